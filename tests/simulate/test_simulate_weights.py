"""More weights than fit: they come on a link in virtual time, and skipping ahead changes nothing."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulate_builders import TIMES, make_request, make_spec, make_workload, run

from hypothesis_profiles import examples
from shoal.cluster.manager.dispatch import DISPATCHES
from shoal.cluster.manager.events import MigrationMethod
from shoal.core import SLO, ConfigError, Request
from shoal.core.cluster import Link
from shoal.forecast import StepRows
from shoal.measure import RequestRow, RunRecord
from shoal.schedule import EarliestDeadline, Fcfs, RoundRobin, Slice, WeightedTurns
from shoal.schedule.policies.residency import RESIDENCY_POLICIES
from shoal.schedule.weights_options import WeightsOptions
from shoal.simulate import ClosedLoop, Deaths, EngineSpec, MigrationSpec, OpenLoop, Simulation, Watch

SECOND = 1_000_000_000
BYTES = {"a": 20, "b": 25, "c": 15, "d": 10}
"""Of weights; a hundred come in a second."""
PREFILL_NS = round(TIMES.step_time(StepRows(0, 0, ((10, 0),), 1)) * 1e9)


def limited(
    memory: int,
    services: str = "ab",
    *,
    blocks: int = 400,
    pins: str = "",
    shared: Mapping[str, str] | None = None,
    slo: SLO | None = None,
    policy: str = "fcfs",
    slowdown: float = 1.0,
    quantum_s: float = 0.2,
    rate: float = 100.0,
    **knobs: Any,
) -> EngineSpec:
    """An engine with this much memory for weights."""
    spec = make_spec(blocks, per_merged=dict.fromkeys(services, 1), **knobs)
    if shared:  # then blocks have one shape
        layouts = {name: replace(spec.layout.services["a"], service=name) for name in services}
        layout = replace(spec.layout, services=layouts)
        spec = replace(spec, layout=layout, host=layout)
    return replace(
        spec,
        services={
            name: replace(
                service,
                weight_bytes=BYTES[(shared or {}).get(name, name)],
                weights=(shared or {}).get(name),
                pinned=name in pins,
                slo=slo or service.slo,
            )
            for name, service in spec.services.items()
        },
        weights=WeightsOptions(
            memory_bytes=memory,
            policy=RESIDENCY_POLICIES[policy](),
            quantum_s=quantum_s,
            max_absence_s=1.0,
        ),
        fetch_bytes_per_s=rate,
        fetch_slowdown=slowdown,
    )


def rows_of(record: RunRecord) -> dict[str, RequestRow]:
    return {row.request_id: row for row in record.requests}


def test_an_engine_is_filled_before_the_first_request() -> None:
    [early], [late] = (
        run([limited(45)], [make_request(0, service="b", at_s=time_s)])[0].requests for time_s in (0.1, 1.0)
    )
    # Service a comes first, as it is declared first: 0.2 s, and then b: 0.25 s.
    assert early.ttft_s == pytest.approx(0.35 + PREFILL_NS / 1e9)
    assert late.ttft_s == pytest.approx(PREFILL_NS / 1e9)


@pytest.mark.parametrize("skip_ahead", [False, True])
def test_a_request_waits_for_its_weights_while_others_step(skip_ahead: bool) -> None:
    requests = [make_request(0, 10, 500, service="b", at_s=1.0), make_request(1, 10, 2, at_s=2.0)]
    spec = limited(45, "abc", pins="b", rate=20.0)  # b and a come, c does not fit
    requests.append(make_request(2, 10, 2, service="c", at_s=3.5))
    record, _ = run([spec], requests, skip_ahead=skip_ahead)
    rows = rows_of(record)
    assert rows["r1"].first_token_ns < 2.5 * SECOND
    # The weights of a leave, and the fetch begins, with the step after that of the arrival.
    waited_s = rows["r2"].ttft_s - 15 / 20
    assert PREFILL_NS / 1e9 < waited_s < PREFILL_NS / 1e9 + 0.03
    assert rows["r0"].largest_gap_ns < 2 * PREFILL_NS, "b steps on"
    totals = record.engines[0].weights
    assert {name: (each.fetches, each.evictions) for name, each in totals.items()} == {
        "a": (1, 1),
        "b": (1, 0),
        "c": (1, 0),
    }
    assert totals["c"].waits == 1
    assert totals["c"].waiting_s == pytest.approx(15 / 20, abs=0.02)


def test_steps_are_slower_while_weights_come() -> None:
    requests = [make_request(0, 10, 300, at_s=0.5), make_request(1, 10, 1, service="b", at_s=1.0)]
    ends = [
        rows_of(run([limited(45, slowdown=slowdown, rate=rate)], requests)[0])["r0"].finish_ns
        for slowdown, rate in ((1.0, 25.0), (1.5, 25.0), (1.5, 1e6))
    ]
    plain_ns, slow_ns, quick_ns = ends
    # Weights come until 1.8 s; a third of the time in which it streams meanwhile is lost.
    assert (slow_ns - plain_ns) / SECOND == pytest.approx((1.8 - 0.8) / 3, rel=0.05)
    assert quick_ns < slow_ns


def test_a_run_ends_with_its_requests() -> None:
    """Fetches that nobody waits for are left."""
    record, _ = run([limited(70, "abcd", rate=0.01)], [make_request(0, 10, 5)])
    assert record.end_ns == record.requests[0].finish_ns < 2100 * SECOND


def test_skipped_steps_end_where_weights_come(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.schedule import Scheduler

    calls = Counter[str]()
    real = Scheduler.schedule
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self, now_ns: (calls.update("x"), real(self, now_ns))[1]
    )
    requests = [make_request(number, 30, 300, service="b", at_s=2.0) for number in range(8)]
    # A request of absent weights keeps no steps of others from being skipped.
    requests.append(make_request(9, 30, 3, service="c", at_s=2.2))
    record, _ = run([limited(45, "abc", blocks=4000, pins="b", rate=20.0)], requests)
    assert record.engines[0].steps > 300
    assert calls["x"] < 40


ORDERS = [Fcfs(), RoundRobin(), WeightedTurns(), EarliestDeadline()]
GOALS = [None, SLO(ttft_s=0.3, tpot_s=0.02)]


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    memory=st.sampled_from([45, 50, 70]),
    services=st.sampled_from(["ab", "abcd"]),
    pins=st.sampled_from(["", "a"]),
    shared=st.sampled_from([None, {"a": "b", "b": "b"}]),
    slo=st.sampled_from(GOALS),
    on_hopeless=st.sampled_from(["serve", "last", "refuse"]),
    policy=st.sampled_from(list(RESIDENCY_POLICIES)),
    slowdown=st.sampled_from([1.0, 1.5]),
    order=st.sampled_from(ORDERS),
    blocks=st.sampled_from([40, 100, 1000]),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    preempt_for_waiting=st.sampled_from(["never", "less-urgent"]),
    starvation_s=st.sampled_from([0.3, 1e6]),
    steps=st.sampled_from([(1, 1), (2, 1), (1, 4)]),
    rate=st.sampled_from([3.0, 20.0, 1e6]),
    seed=st.integers(0, 10_000),
)
@example(
    memory=45,
    services="abcd",
    pins="",
    shared=None,
    slo=SLO(ttft_s=0.3, tpot_s=0.02),
    on_hopeless="refuse",  # requests whose weights are absent, too
    policy="fcfs",
    slowdown=1.0,
    order=EarliestDeadline(),
    blocks=100,
    preemption_mode="swap",
    preempt_for_waiting="less-urgent",
    starvation_s=0.3,
    steps=(1, 1),
    rate=1e6,
    seed=59,
)
def test_skip_ahead_on_and_off_leave_identical_records_and_logs(
    memory: int, services: str, steps: tuple[int, int], rate: float, seed: int, **knobs: Any
) -> None:
    depth, max_iterations = steps
    spec = limited(
        memory,
        services,
        depth=depth,
        max_iterations=max_iterations,
        victim="newest",
        max_batched_tokens=64,
        **knobs,
    )
    requests = make_workload(24, rate=rate, services=services, seed=seed)
    on, log_on = run([spec], requests, skip_ahead=True)
    off, log_off = run([spec], requests, skip_ahead=False)
    assert log_on == log_off
    assert on == off
    assert Counter(row.request_id for row in on.requests) == {one.id: 1 for one in requests}


@settings(max_examples=examples(25), deadline=None)
@given(
    clients=st.sampled_from([None, 7]),
    policy=st.sampled_from(list(RESIDENCY_POLICIES)),
    dispatch=st.sampled_from(["least-requests", "max-min"]),
    depth=st.sampled_from([1, 2]),
    seed=st.integers(0, 10_000),
)
def test_several_engines_and_clients_that_wait(
    clients: int | None, policy: str, dispatch: str, depth: int, seed: int
) -> None:
    specs = [limited(memory, "abc", policy=policy, depth=depth) for memory in (45, 50)]
    requests = make_workload(50, rate=60.0, services="abc", seed=seed)
    records = []
    for skip_ahead in (True, False):
        source = requests if clients is None else ClosedLoop(requests, clients)
        record, log = run(specs, source, skip_ahead=skip_ahead, dispatch=DISPATCHES[dispatch])
        records.append((record, [[line for line in log if line.startswith(number)] for number in "01"]))
    assert records[0] == records[1]


@example(wanted=[], deaths=[(0.5, 0)], depth=1, seed=1)  # in the middle of a run of decodes
@settings(max_examples=examples(25), deadline=None)
@given(
    wanted=st.lists(
        st.tuples(
            st.floats(0.1, 2.0),
            st.sampled_from([f"r{number}" for number in range(20)]),
            st.sampled_from([0, 1]),
            st.sampled_from(list(MigrationMethod)),
        ),
        max_size=6,
    ),
    deaths=st.lists(st.tuples(st.floats(0.3, 2.0), st.sampled_from([0, 1])), max_size=1),
    depth=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_requests_move_between_engines_whose_weights_come_and_go(
    wanted: list[tuple[float, str, int, MigrationMethod]],
    deaths: list[tuple[float, int]],
    depth: int,
    seed: int,
) -> None:
    requests = make_workload(20, rate=20.0, services="abc", seed=seed)
    records = []
    for skip_ahead in (True, False):
        simulation = Simulation(
            [limited(45, "abc", depth=depth), limited(50, "abc", depth=depth)],
            OpenLoop(requests),
            dispatch=DISPATCHES["least-requests"],
            watch=Watch(skip_ahead=skip_ahead, sample_s=0.05),
            deaths=Deaths(times=deaths, load_s=0.3),
            migrations=MigrationSpec(link=Link(bytes_per_s=1e5, latency_s=1e-4), wanted=wanted),
        )
        records.append(simulation.run())
        assert all(
            replica.unfinished == len(replica.scheduler.leases) == 0 for replica in simulation.replicas
        )
    on, off = records
    assert on.requests == off.requests
    assert on.samples == off.samples
    assert on.moves == off.moves
    assert sorted(row.request_id for row in on.requests) == sorted(request.id for request in requests)


def alternating(count: int, services: str, *, since_s: float, every_s: float) -> list[Request]:
    return [
        make_request(number, service=services[number % len(services)], at_s=since_s + number * every_s)
        for number in range(count)
    ]


@pytest.mark.parametrize("dispatch", ["max-min", "least-requests", "forecast", "prefix"])
def test_requests_go_to_the_engine_that_has_their_weights(dispatch: str) -> None:
    """Both engines begin with a. The first request for b fetches it, and none comes after that."""
    record, _ = run(
        [limited(25)] * 2, alternating(30, "ba", since_s=1.0, every_s=0.5), dispatch=DISPATCHES[dispatch]
    )
    assert len({(row.service, row.engine) for row in record.requests}) == 2
    fetches = [{name: each.fetches for name, each in engine.weights.items()} for engine in record.engines]
    assert sorted(map(str, fetches)) == ["{'a': 1, 'b': 0}", "{'a': 1, 'b': 1}"]


def test_turns_do_not_look_at_weights() -> None:
    requests = alternating(16, "aabb", since_s=1.0, every_s=1.0)
    record, _ = run([limited(25)] * 2, requests, dispatch=DISPATCHES["round-robin"])
    assert {(row.service, row.engine) for row in record.requests} == {(s, e) for s in "ab" for e in (0, 1)}


def test_an_engine_that_has_loaded_again_reports_its_weights() -> None:
    """Engine 0 has a again, and engine 1 still has b."""
    requests = [
        make_request(0, 10, 200, at_s=1.0),
        make_request(1, service="b", at_s=1.5),
        make_request(2, service="b", at_s=20.0),
    ]
    record = Simulation(
        [limited(25)] * 2,
        OpenLoop(requests),
        dispatch=DISPATCHES["max-min"],
        deaths=Deaths(times=[(6.0, 0)], load_s=2.0),
        watch=Watch(),
    ).run()
    assert [rows_of(record)[name].engine for name in ("r0", "r1", "r2")] == [0, 1, 1]
    assert rows_of(record)["r2"].ttft_s == pytest.approx(PREFILL_NS / 1e9)


def test_an_engine_that_has_loaded_again_fetches_at_once() -> None:
    requests = [make_request(0, 10, 3, at_s=1.0), make_request(1, 10, 3, service="b", at_s=9.0)]
    simulation = Simulation(
        [limited(45)], OpenLoop(requests), deaths=Deaths(times=[(2.0, 0)], load_s=2.0), watch=Watch()
    )
    record = simulation.run()
    assert rows_of(record)["r1"].ttft_s == pytest.approx(PREFILL_NS / 1e9)
    assert record.engines[0].weights["a"].fetches == 2, "one of each incarnation"


def test_a_budget_for_all_weights_is_as_no_budget() -> None:
    requests = make_workload(30, services="abc", seed=3)
    later = [replace(request, arrival_ns=request.arrival_ns + SECOND) for request in requests]
    spec = limited(60, "abc")
    free = replace(spec, weights=WeightsOptions())
    rows, expected = (run([each], later)[0].requests for each in (spec, free))
    assert rows == expected


def test_ranks_need_all_weights() -> None:
    with pytest.raises(ConfigError, match="need all weights to stay"):
        Simulation([limited(45, "a")] * 2, OpenLoop([]), lock_step=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fetch_bytes_per_s": None}, "nothing says how fast weights come; write weights.bandwidth"),
        ({"fetch_slowdown": 0.9}, "fetch_slowdown must be at least 1"),
    ],
)
def test_what_a_limit_needs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(limited(45), **change)


def test_sizes_must_be_known() -> None:
    spec = limited(45)
    services = {name: replace(service, weight_bytes=0) for name, service in spec.services.items()}
    with pytest.raises(ConfigError, match="size of the weights of a, b is not known"):
        replace(spec, services=services)
    replace(spec, services=services, weights=WeightsOptions())


def test_slices_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="slices"):
        limited(45, admission=Slice(tokens=7))


def test_the_bandwidth_limits_the_link() -> None:
    spec = limited(45)
    seconds = [
        replace(
            spec, fetch_bytes_per_s=link, weights=replace(spec.weights, bandwidth=bandwidth)
        ).fetch_times.seconds["a"]
        for link, bandwidth in ((100.0, None), (100.0, 10.0), (100.0, 1e9), (None, 20.0))
    ]
    assert seconds == [0.2, 2.0, 0.2, 1.0]
