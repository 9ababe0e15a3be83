"""Simulated engines behind a manager that forms batches: none is lost, and skipping ahead changes nothing."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate_builders import PLAIN, TIMES, make_request, make_spec, make_workload

from hypothesis_profiles import examples
from shoal.batches import FORMERS
from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.manager.dispatch import DISPATCHES
from shoal.cluster.manager.events import MigrationMethod
from shoal.core import ConfigError, Request, StepPlan
from shoal.core.cluster import Link
from shoal.forecast.step_times import ScaledTimes
from shoal.measure import RunRecord
from shoal.schedule import ADMISSIONS, ORDERS, Batch, RequestState, describe
from shoal.simulate import Deaths, EngineSpec, MigrationSpec, OpenLoop, Simulation, Watch
from shoal.simulate.fleet import Fleet


def simulate(
    specs: Sequence[EngineSpec],
    requests: Sequence[Request],
    batching: BatchingOptions,
    *,
    dispatch: str = "round-robin",
    skip_ahead: bool = True,
    deaths: Deaths | None = None,
) -> tuple[RunRecord, list[str]]:
    """The record and each engine's schedule log, engine by engine."""
    log: list[tuple[int, str]] = []

    def note(engine: int, plan: StepPlan, made_ns: int, steps_ns: Sequence[int]) -> None:
        log.append((engine, describe(plan, made_ns, steps_ns)))

    simulation = Simulation(
        specs,
        OpenLoop(requests),
        dispatch=DISPATCHES[dispatch],
        batching=batching,
        watch=Watch(skip_ahead=skip_ahead, spans=True),
        on_plan=note,
        deaths=deaths,
    )
    record = simulation.run()
    return record, [line for _, line in sorted(log, key=lambda entry: entry[0])]


batching = st.builds(
    BatchingOptions,
    former=st.sampled_from(sorted(FORMERS)),
    interval_s=st.sampled_from([None, 0.2, 1.0]),
    slice_tokens=st.sampled_from([None, 5, 16]),
    max_batch=st.sampled_from([None, 4]),
    trust_predictions=st.booleans(),
    longest_first=st.booleans(),
    lengths=st.sampled_from(["history", "learned", "maximum", "oracle"]),
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batching=batching,
    order=st.sampled_from(sorted(ORDERS)),
    admission=st.sampled_from(sorted(ADMISSIONS)) | st.just("batch"),
    dispatch=st.sampled_from(sorted(DISPATCHES)),
    blocks=st.sampled_from([40, 200]),
    depth=st.sampled_from([1, 2]),
    iterations=st.sampled_from([1, 4]),
    engines=st.sampled_from([1, 2]),
    services=st.sampled_from([{"a": 1}, {"a": 3, "b": 2}]),
    starvation_s=st.sampled_from([0.3, 1e6]),
    dies=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_every_request_is_answered_in_full_and_skipping_ahead_changes_nothing(
    batching: BatchingOptions,
    order: str,
    admission: str,
    dispatch: str,
    blocks: int,
    depth: int,
    iterations: int,
    engines: int,
    services: dict[str, int],
    starvation_s: float,
    dies: bool,
    seed: int,
) -> None:
    spec = make_spec(
        blocks,
        per_merged=services,
        order=ORDERS[order](),
        admission=ADMISSIONS[admission](),
        max_batched_tokens=64,
        depth=depth if iterations == 1 else 1,
        max_iterations=iterations,
        starvation_s=starvation_s,
    )
    requests = make_workload(20, rate=30.0, services=tuple(services), seed=seed)
    deaths = Deaths(times=((0.4, 0),), load_s=0.5) if dies else None
    records = [
        simulate([spec] * engines, requests, batching, dispatch=dispatch, skip_ahead=ahead, deaths=deaths)
        for ahead in (True, False)
    ]
    record, log = records[0]
    assert log == records[1][1]
    assert record.requests == records[1][0].requests
    assert Counter(row.request_id for row in record.requests) == {one.id: 1 for one in requests}
    lengths = {row.request_id: row.output_tokens for row in record.requests}
    assert lengths == {one.id: one.true_output_tokens for one in requests}


def test_one_batch_runs_after_another_from_the_first_to_the_last_token() -> None:
    spec = make_spec(options=PLAIN, admission=Batch())
    requests = [make_request(number, 10, 5 + 5 * number, at_s=0.001 * number) for number in range(6)]
    record, _ = simulate([spec], requests, BatchingOptions(max_batch=2))
    rows = {row.request_id: row for row in record.requests}
    # The first came alone; then batches of two.
    batches = [["r0"], ["r1", "r2"], ["r3", "r4"], ["r5"]]
    for before, after in pairwise(batches):
        ended = max(rows[name].finish_ns for name in before)
        assert all(rows[name].first_token_ns > ended for name in after)


def test_slices_interleave_long_and_short_requests() -> None:
    spec = make_spec(options=PLAIN, admission=Batch())
    requests = [make_request(0, 10, 400), *[make_request(n, 10, 10, at_s=0.01) for n in range(1, 5)]]
    whole, _ = simulate([spec], requests, BatchingOptions(max_batch=4))
    sliced, _ = simulate([spec], requests, BatchingOptions(max_batch=4, slice_tokens=20))

    def first_ends(record: RunRecord) -> str:
        return min(record.requests, key=lambda row: row.finish_ns).request_id

    assert first_ends(whole) == "r0"
    assert first_ends(sliced) != "r0"
    [row] = [row for row in sliced.requests if row.request_id == "r0"]
    assert row.output_tokens == 400
    assert row.recomputed_tokens > 0  # its prompt has no hashes, so nothing of it is cached


def test_one_engine_forms_batches_by_its_own_speed() -> None:
    slow = make_spec(options=PLAIN, admission=Batch(), times=ScaledTimes(TIMES, 100.0))
    requests = [make_request(number, 10, 20, at_s=0.001 * number) for number in range(8)]
    # With a load of many seconds the next formation is far away.
    batching = BatchingOptions(interval_s=0.01, load_factor=0.9)
    record, _ = simulate([slow], requests, batching)
    first, *others = sorted(record.requests, key=lambda row: row.first_token_ns)
    assert all(row.first_token_ns > first.finish_ns for row in others)


@pytest.mark.parametrize("method", list(MigrationMethod))
@pytest.mark.parametrize("at_s", [0.05, 0.25, 0.6, 0.9])
def test_a_slice_goes_on_where_a_request_migrates(
    method: MigrationMethod, at_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    slice_ended = Fleet.slice_ended

    def note(fleet: Fleet, state: RequestState) -> None:
        ends.append(state.num_generated)
        slice_ended(fleet, state)

    monkeypatch.setattr(Fleet, "slice_ended", note)
    spec = make_spec(options=PLAIN, admission=Batch())
    link = Link(bytes_per_s=1e9, latency_s=1e-4)
    simulation = Simulation(
        [spec, spec],
        OpenLoop([make_request(0, 10, 150)]),
        dispatch=DISPATCHES["round-robin"],
        batching=BatchingOptions(slice_tokens=60),
        migrations=MigrationSpec(link=link, wanted=((at_s, "r0", None, method),)),
    )
    record = simulation.run()
    assert [row.output_tokens for row in record.requests] == [150]
    assert record.moves[method.value]["done"] == 1
    assert ends == [60, 120]


def test_ranks_that_step_together_take_requests_one_by_one() -> None:
    with pytest.raises(ConfigError, match="requests that are dispatched one by one"):
        Simulation([make_spec()] * 2, OpenLoop([make_request(0)]), lock_step=True, batching=BatchingOptions())
