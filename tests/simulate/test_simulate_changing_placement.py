"""A cluster whose placement changes while it serves."""

import itertools

import pytest
from placed_builders import case

from shoal.place.estimate import Found
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.placement import Placement
from shoal.place.re_placement import Hysteresis, IntervalRule
from shoal.simulate.changing_placement import ChangingCluster
from shoal.simulate.periodic_placement import serve_replacing
from shoal.simulate.simulated_groups import SimulatedGroups


def world(seconds: float = 4):
    problem, traffic, _ = case(devices=3, services=2, seconds=seconds, seed=0)
    requests = [request for each in traffic.requests.values() for request in each]
    d0, d1, d2 = problem.cluster.devices
    apart = Placement.sharing([([d0], ["s0"]), ([d1], ["s1"]), ([d2], ["s0"])])
    shared = Placement.sharing([([d0, d1], ["s0", "s1"]), ([d2], ["s1"])])
    return traffic, requests, apart, shared


def test_without_a_change_it_is_the_simulation_of_its_placement():
    traffic, requests, apart, shared = world()
    for placement in (apart, shared):
        cluster = ChangingCluster(traffic.engines, placement, requests)
        cluster.run()
        whole = traffic.engines.simulate(placement, requests)
        assert sorted(cluster.rows, key=lambda row: row.request_id) == sorted(
            whole.requests, key=lambda row: row.request_id
        )


def test_stopping_now_and_then_changes_nothing():
    traffic, requests, apart, _ = world()
    whole, parts = (ChangingCluster(traffic.engines, apart, requests) for _ in range(2))
    whole.run()
    for step in range(1, 30):
        parts.run(step * 0.17)
    parts.run()
    assert parts.rows == whole.rows


@pytest.mark.parametrize("when_s", [0.5, 1.3, 2.9])
def test_every_request_is_answered_once_over_a_change(when_s):
    traffic, requests, apart, shared = world()
    cluster = ChangingCluster(traffic.engines, apart, requests)
    cluster.run(when_s)
    change = cluster.change(shared)
    assert cluster.placement == change.after
    cluster.run()
    assert sorted(row.request_id for row in cluster.rows) == sorted(request.id for request in requests)
    lengths = {request.id: request.true_output_tokens for request in requests}
    assert all(row.answered and row.output_tokens == lengths[row.request_id] for row in cluster.rows)


def test_requests_wait_while_weights_are_loaded():
    traffic, requests, apart, shared = world()
    slow, quick = (
        ChangingCluster(traffic.engines, apart, requests, load_bytes_per_s=rate) for rate in (5e9, 1e15)
    )
    for cluster in (slow, quick):
        cluster.run(1.0)
        cluster.change(shared)
        cluster.run()
    late = [sum(row.e2e_s for row in cluster.rows) for cluster in (slow, quick)]
    assert late[0] > late[1] + 1


def test_a_change_to_the_same_placement_is_none():
    traffic, requests, apart, _ = world()
    still, changed = (ChangingCluster(traffic.engines, apart, requests) for _ in range(2))
    still.run()
    changed.run(1.0)
    assert changed.change(apart).load_bytes == 0
    changed.run()
    assert changed.rows == still.rows


def test_with_hysteresis_only_better_placements_are_taken():
    traffic, requests, apart, shared = world(seconds=6)
    evaluator = GroupwiseEvaluator(SimulatedGroups(traffic))
    good, bad = (Found(each, evaluator.evaluate([each])[0]) for each in (apart, shared))
    if good.estimate.normalised_latency > bad.estimate.normalised_latency:
        good, bad = bad, good
    rule = IntervalRule(first_s=1.0, least_s=0.5, most_s=2.0)

    def run(start, other, hysteresis):
        cluster = ChangingCluster(traffic.engines, start.placement, requests)

        def placer(recent, window_s, present):
            return other, start.estimate

        return serve_replacing(cluster, requests, placer, start.estimate, rule, hysteresis)

    never = Hysteresis(attainment=0.5, latency=0.99)
    assert not any(interval.changed for interval in run(good, bad, never))
    literal = run(good, bad, None)
    assert literal[0].changed
    assert literal[0].load_bytes > 0
    assert all(
        after.begin_s == pytest.approx(before.begin_s + before.length_s)
        for before, after in itertools.pairwise(literal)
    )
