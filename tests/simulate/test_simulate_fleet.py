"""Simulated fleets whose size follows the load."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_builders import make_request, make_spec, make_workload

from hypothesis_profiles import examples
from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.manager.dispatch import dispatch_named
from shoal.core import Request
from shoal.core.cluster import Link
from shoal.measure import RunRecord, summarise
from shoal.simulate import Deaths, EngineSpec, MigrationSpec, OpenLoop, Simulation, Watch

LINK = Link(bytes_per_s=1e9, latency_s=0.001)


def run(
    engines: list[EngineSpec],
    requests: list[Request],
    fleet: FleetOptions | None,
    *deaths: tuple[float, int],
    dispatch: str = "max-min",
    skip_ahead: bool = True,
    load_s: float = 2.0,
) -> RunRecord:
    simulation = Simulation(
        engines,
        OpenLoop(requests),
        dispatch=dispatch_named(dispatch),
        watch=Watch(skip_ahead=skip_ahead),
        deaths=Deaths(times=deaths, load_s=load_s),
        migrations=MigrationSpec(link=LINK),
        fleet=fleet,
    )
    record = simulation.run()
    assert {row.request_id for row in record.requests} == {request.id for request in requests}
    return record


def test_an_engine_that_is_not_needed_runs_for_the_idle_time_only() -> None:
    """One request at the start and one at 100 s: the second engine goes after 10 s, for good."""
    requests = [make_request(0), make_request(1, at_s=100)]
    record = run([make_spec(), make_spec()], requests, FleetOptions(idle_s=10))
    one, other = record.engines
    assert one.up == 1
    assert other.up is not None
    assert other.up * 100 == pytest.approx(10, abs=0.5)
    assert summarise(record).engines_up == pytest.approx(1.1, abs=0.01)


def test_engines_come_back_for_more_load_and_load_first() -> None:
    """From 30 s on 40 requests a second, each 0.4 s long, need two engines of 1,600 tokens, 80% filled."""
    requests = [make_request(0)]
    for number in range(240):
        requests.append(make_request(1 + number, 60, 40, at_s=30 + number / 40, max_tokens=40))
    record = run([make_spec(), make_spec()], requests, FleetOptions(idle_s=5), load_s=1.0)
    events = [(event.engine, event.kind) for event in record.events if event.kind.endswith("activated")]
    assert events[:2] == [(1, "deactivated"), (1, "activated")]
    [back_ns] = [event.time_ns for event in record.events if event.kind == "activated"]
    served = [row for row in record.requests if row.engine == 1]
    assert served
    assert min(row.finish_ns for row in served) > back_ns + 1e9


def test_without_a_size_all_engines_run() -> None:
    record = run([make_spec(), make_spec()], make_workload(20), None)
    assert [engine.up for engine in record.engines] == [None, None]
    assert summarise(record).engines_up is None


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([2.0, 10.0, 60.0]),
    dispatch=st.sampled_from(["max-min", "least-requests", "mell", "best-fit", "prefix"]),
    deaths=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2)), max_size=3),
    requests=st.none() | st.integers(1, 6),
    idle_s=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_every_request_is_answered_and_skipping_ahead_changes_nothing(
    seed: int,
    rate: float,
    dispatch: str,
    deaths: list[tuple[float, int]],
    requests: int | None,
    idle_s: float,
) -> None:
    workload = make_workload(60, rate=rate, seed=seed)
    fleet = FleetOptions(idle_s=idle_s, requests=requests)
    engines = [make_spec(60) for _ in range(3)]
    records = [
        run(engines, workload, fleet, *deaths, dispatch=dispatch, skip_ahead=skip) for skip in (True, False)
    ]
    assert records[0].requests == records[1].requests
    assert [engine.up for engine in records[0].engines] == [engine.up for engine in records[1].engines]
    assert all(row.output_tokens for row in records[0].requests if row.finish != "refused")
    assert all(engine.up is not None and 0 <= engine.up <= 1 for engine in records[0].engines)


def test_an_engine_that_loads_at_the_end_was_up_for_a_share_of_the_run() -> None:
    """The request is refused long after the last step, while its engine loads."""
    requests = [make_request(0, 10, 500, max_tokens=500)]
    record = run([make_spec()], requests, FleetOptions(idle_s=10), (0.1, 0), load_s=100.0)
    assert all(engine.up is not None and 0 <= engine.up <= 1 for engine in record.engines)
