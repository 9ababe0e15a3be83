"""Placements estimated by simulation."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed_builders import case

from shoal.place.estimate import Estimate
from shoal.place.exhaustive import search_exhaustive
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.placement import Placement
from shoal.place.search import search, search_screened
from shoal.simulate.parallel import Workers
from shoal.simulate.placed_engines import PlacedEngines
from shoal.simulate.simulated_groups import SimulatedGroups, estimates, thinned
from shoal.workload import FixedLength, Gamma, Independent, generate_rows, to_requests


@given(st.integers(0, 200), st.floats(0.01, 1.0), st.floats(0, 1, exclude_max=True))
def test_thinning_keeps_its_share_evenly(count, share, offset):
    rows = generate_rows(Independent(FixedLength(10), FixedLength(2)), Gamma(1.0, 1.0), count, seed=1)
    requests = to_requests(rows, "s")
    kept = thinned(requests, share, offset)
    assert abs(len(kept) - count * share) <= 1
    places = [requests.index(request) for request in kept]
    gaps = [after - before for before, after in pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.integers(0, 100), st.integers(1, 6))
def test_shares_that_begin_apart_are_all_requests_together(count, parts):
    rows = generate_rows(Independent(FixedLength(10), FixedLength(2)), Gamma(1.0, 1.0), count, seed=1)
    requests = to_requests(rows, "s")
    kept = [thinned(requests, 1 / parts, part / parts) for part in range(parts)]
    assert sorted(request.id for share in kept for request in share) == sorted(r.id for r in requests)


def test_groups_together_serve_as_the_whole_placement_without_replicas():
    problem, traffic, _ = case(devices=3, services=3, seconds=5, seed=0)
    d0, d1, d2 = problem.cluster.devices
    placement = Placement.sharing([([d0], ["s0", "s1"]), ([d1, d2], ["s2"])])
    [estimate] = GroupwiseEvaluator(SimulatedGroups(traffic)).evaluate([placement])
    requests = [request for each in traffic.requests.values() for request in each]
    whole = Estimate(estimates(traffic.engines.simulate(placement, requests), list(problem.rates)))
    assert estimate.services == whole.services


def test_services_without_a_group_are_unserved():
    problem, traffic, _ = case(devices=1, services=2, seconds=3, seed=0)
    placement = Placement.sharing([(problem.cluster.devices, ["s0"])])
    requests = [request for each in traffic.requests.values() for request in each]
    for found in (
        GroupwiseEvaluator(SimulatedGroups(traffic)).evaluate([placement])[0],
        Estimate(estimates(traffic.engines.simulate(placement, requests), list(problem.rates))),
    ):
        assert found.services["s1"].attainment == 0
        assert found.services["s1"].normalised_latency == 0
        assert found.services["s0"].answered == len(traffic.requests["s0"])


def test_fixed_parts_are_slower_than_taking_turns_at_a_light_load():
    problem, traffic, _ = case(devices=1, services=2, seconds=3, seed=0)
    placement = Placement.sharing([(problem.cluster.devices, ["s0", "s1"])])
    requests = [request for each in traffic.requests.values() for request in each]
    engines = traffic.engines
    parts = PlacedEngines(
        services=engines.services, memory=engines.memory, times=engines.times, fixed_parts=True
    )
    turns, fixed = (each.simulate(placement, requests) for each in (engines, parts))
    found = [Estimate(estimates(run, ["s0", "s1"])).normalised_latency for run in (turns, fixed)]
    assert found[0] < found[1]


@pytest.mark.slow
def test_a_screened_search_in_processes_finds_what_it_finds_in_one():
    problem, traffic, screen = case(devices=2, services=2, seconds=3, seed=1)
    alone = search_screened(problem, screen, GroupwiseEvaluator(SimulatedGroups(traffic)))
    with Workers(traffic, 2) as workers:
        evaluator = GroupwiseEvaluator(SimulatedGroups(traffic, workers))
        assert search_screened(problem, screen, evaluator) == alone


@pytest.mark.slow
def test_search_by_simulation_is_within_five_percent_of_the_best_placement_in_95_percent_of_cases():
    cases = 20
    close = 0
    for seed in range(cases):
        devices, services = 2 + seed // 18, 2 + seed % 2
        problem, traffic, _ = case(devices, services, seconds=2, seed=seed, rate=1.0 + seed % 3 * 3)
        evaluator = GroupwiseEvaluator(SimulatedGroups(traffic))
        ours = search(problem, evaluator).estimate
        best = search_exhaustive(problem, evaluator).estimate
        equal = ours.attainment == best.attainment
        close += equal and ours.normalised_latency <= 1.05 * best.normalised_latency
    assert close >= 0.95 * cases
