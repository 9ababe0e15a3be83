"""Simulated requests that move between engines: nothing is lost, and a move costs what its link does."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_builders import TIMES, make_request, make_spec, make_workload

from hypothesis_profiles import examples
from shoal.cluster.manager.dispatch import DISPATCHES
from shoal.cluster.manager.events import MigrationMethod
from shoal.core import ConfigError, Request, StepPlan
from shoal.core.cluster import Link
from shoal.forecast import FittedTimes, LatencyModel, StepRows
from shoal.measure import RequestRow, RunRecord
from shoal.schedule import Slice, describe
from shoal.simulate import Deaths, EngineSpec, MigrationSpec, OpenLoop, Simulation, Watch

SECOND = 1_000_000_000
LIVE, STOP, TOKENS = MigrationMethod.LIVE, MigrationMethod.STOP, MigrationMethod.TOKENS
LINK = Link(bytes_per_s=1e5, latency_s=1e-4)
TICK_S = 1 / 128
TICKS = FittedTimes(LatencyModel(constant_s=TICK_S, sequence_s=0, token_s=0, context_s=0, work_s=0))
"""Every step takes as long, so that events can come at its very end."""
BLOCK_BYTES = 4 * (8 + 8) * 4
"""Of four tokens of service a: a layer with a key and a value of 8 float32 each."""


def seconds(rows: StepRows) -> int:
    return round(TIMES.step_time(rows) * 1e9)


def run(
    engines: list[EngineSpec],
    requests: list[Request],
    migrations: MigrationSpec,
    *,
    deaths: Sequence[tuple[float, int]] = (),
    dispatch: str = "least-requests",
    skip_ahead: bool = True,
    log: list[str] | None = None,
) -> RunRecord:
    """The record of a simulation at whose end nothing is left on any engine."""

    def note(engine: int, plan: StepPlan, made_ns: int, steps_ns: Sequence[int]) -> None:
        assert log is not None
        log.append(f"{engine}: {describe(plan, made_ns, steps_ns)}")

    simulation = Simulation(
        engines,
        OpenLoop(requests),
        dispatch=DISPATCHES[dispatch],
        watch=Watch(skip_ahead=skip_ahead, sample_s=0.05, spans=True),
        deaths=Deaths(times=deaths, load_s=0.3),
        migrations=migrations,
        on_plan=None if log is None else note,
    )
    record = simulation.run()
    for replica, spec in zip(simulation.replicas, engines, strict=True):
        assert replica.unfinished == len(replica.scheduler.leases) == 0
        assert all(replica._pool.live_blocks(service) == 0 for service in spec.services)
    assert sorted(row.request_id for row in record.requests) == sorted(request.id for request in requests)
    return record


def rows_of(record: RunRecord) -> dict[str, RequestRow]:
    return {row.request_id: row for row in record.requests}


@pytest.mark.parametrize("skip_ahead", [False, True])
@pytest.mark.parametrize("method", list(MigrationMethod))
def test_a_migrated_request_ends_as_if_it_had_stayed(method: MigrationMethod, skip_ahead: bool) -> None:
    request = make_request(0, 50, 100)
    still = rows_of(run([make_spec()], [request], MigrationSpec()))["r0"]
    migrations = MigrationSpec(link=LINK, wanted=[(0.3, "r0", 1, method)])
    record = run([make_spec(), make_spec()], [request], migrations, skip_ahead=skip_ahead)
    [row] = record.requests
    assert record.moves == {method.value: {"done": 1}}
    assert (row.engine, row.finish, row.output_tokens) == (1, "stop", 100)
    assert (row.arrival_ns, row.first_token_ns) == (still.arrival_ns, still.first_token_ns)
    assert row.preemptions == 0
    assert (row.recomputed_tokens > 50) == (method is TOKENS)
    assert sum(engine.output_tokens for engine in record.engines) == 100
    # The tokens were made one after the other: what it took longer is the pause.
    gap_ns = row.largest_gap_ns - still.largest_gap_ns
    assert 0 < row.finish_ns - still.finish_ns <= gap_ns + seconds(StepRows(1, 150, (), 1))


def first_decode_end(after_ns: int, prompt: int) -> tuple[int, int]:
    """When the first step ends at or after a time, and how many tokens the request has then."""
    time_ns, tokens = seconds(StepRows(0, 0, ((prompt, 0),), 1)), prompt + 1
    while time_ns < after_ns:
        time_ns += seconds(StepRows(1, tokens, (), 1))
        tokens += 1
    return time_ns, tokens


@pytest.mark.parametrize("skip_ahead", [False, True])
def test_stop_and_copy_pauses_for_what_the_link_takes(skip_ahead: bool) -> None:
    want_ns = 300_000_000
    migrations = MigrationSpec(link=LINK, wanted=[(want_ns / 1e9, "r0", 1, STOP)])
    record = run([make_spec(), make_spec()], [make_request(0, 50, 100)], migrations, skip_ahead=skip_ahead)
    # The destination is idle and answers at once; the source when its step has ended.
    _, tokens = first_decode_end(want_ns + 100_000, 50)
    blocks = -(-(tokens - 1) // 4)
    sent_ns = blocks * BLOCK_BYTES * 10_000 + 100_000 + 1
    assert record.requests[0].largest_gap_ns == sent_ns + seconds(StepRows(1, tokens, (), 1))
    assert sent_ns > 10_000_000


def test_a_live_migration_pauses_only_for_the_last_blocks() -> None:
    migrations = MigrationSpec(link=LINK, wanted=[(0.3, "r0", 1, LIVE)])
    record = run([make_spec(), make_spec()], [make_request(0, 50, 100)], migrations)
    [row] = record.requests
    # Two blocks that were full when the last round ended, and one that is not full.
    most_ns = 3 * BLOCK_BYTES * 10_000 + 100_000 + 1
    assert 0 < row.largest_gap_ns - seconds(StepRows(1, 100, (), 1)) <= most_ns
    assert record.moves == {"live": {"done": 1}}


def test_transfers_to_one_engine_wait_for_each_other() -> None:
    requests = [make_request(number, 50, 100) for number in range(2)]
    migrations = MigrationSpec(link=LINK, wanted=[(0.3, "r0", 2, STOP), (0.3, "r1", 2, STOP)])
    rows = rows_of(run([make_spec()] * 3, requests, migrations, dispatch="round-robin"))
    _, tokens = first_decode_end(300_100_000, 50)
    sent_ns = -(-(tokens - 1) // 4) * BLOCK_BYTES * 10_000
    first, second = (rows[name].largest_gap_ns for name in ("r0", "r1"))
    assert first == sent_ns + 100_001 + seconds(StepRows(1, tokens, (), 1))
    assert 2 * sent_ns < second - first + sent_ns < 2 * sent_ns + 2 * seconds(StepRows(2, 2 * tokens, (), 2))


def test_a_commit_that_waits_for_kv_keeps_the_age_of_its_request() -> None:
    # The destination knows whose KV comes long before all of it has.
    slow = Link(bytes_per_s=3e3, latency_s=1e-4)
    migrations = MigrationSpec(link=slow, wanted=[(0.3, "r0", 1, STOP)])
    request = make_request(0, 50, 100, at_s=0.125)
    [row] = run([make_spec(), make_spec()], [request], migrations).requests
    assert (row.arrival_ns, row.first_token_ns) == (
        SECOND // 8,
        SECOND // 8 + seconds(StepRows(0, 0, ((50, 0),), 1)),
    )
    assert 1.5 * SECOND < row.largest_gap_ns < 2.5 * SECOND


@pytest.mark.parametrize("link", [LINK, None])
def test_a_drained_engine_loses_its_requests_and_gets_none(link: Link | None) -> None:
    requests = [make_request(number, 20, 150, at_s=number / 20) for number in range(20)]
    migrations = MigrationSpec(link=link, drains=[(0.4, 0)])
    record = run([make_spec(2000), make_spec(2000)], requests, migrations)
    assert {row.engine for row in record.requests} == {1}
    assert all(row.output_tokens == 150 and row.finish == "stop" for row in record.requests)
    [(method, outcomes)] = record.moves.items()
    assert (method, set(outcomes)) == ("tokens" if link is None else "live", {"done"})
    counts = {(event.kind, event.engine): event.count for event in record.events}
    assert counts[("drained", 0)] == 1
    moved = [event for event in record.events if event.kind == "moved"]
    assert {event.engine for event in moved} == {1}
    assert sum(event.count for event in moved) == sum(outcomes.values())
    assert all(event.time_ns >= 0.4 * SECOND for event in record.events)
    gone = [span.end_ns for span in record.spans if span.engine == 0]
    assert 0.4 * SECOND <= max(gone) < SECOND
    if link is not None:
        assert record.engines[1].recomputed_tokens == 0
        assert max(row.largest_gap_ns for row in record.requests) < SECOND // 20


def test_a_drained_engine_keeps_requests_for_which_there_is_no_room() -> None:
    requests = [make_request(number, 40, 100) for number in range(8)]
    record = run([make_spec(160), make_spec(150)], requests, MigrationSpec(link=LINK, drains=[(0.5, 0)]))
    assert all(row.output_tokens == 100 for row in record.requests)
    assert {row.engine for row in record.requests} == {0, 1}
    assert record.moves["live"]["aborted"] > 0


def test_no_kv_goes_to_engines_whose_blocks_are_others_or_that_run_in_slices() -> None:
    request, migrations = make_request(0, 50, 100), MigrationSpec(link=LINK, wanted=[(0.3, "r0", 1, LIVE)])
    for other in (
        make_spec(block_size=8),
        make_spec(per_merged={"a": 2}, block_size=4),
        make_spec(admission=Slice(tokens=16)),
    ):
        record = run([make_spec(), other], [request], migrations)
        assert record.moves == {"tokens": {"done": 1}} or other.layout.block_size == 4
        assert record.requests[0].engine == 1


def test_migrations_of_unknown_requests_are_ignored() -> None:
    wanted = [(0.0, "r0", 1, LIVE), (0.3, "nobody", 1, LIVE), (0.3, "r0", 0, LIVE), (9.0, "r0", 1, STOP)]
    record = run(
        [make_spec(), make_spec()],
        [make_request(0, 50, 100, at_s=0.1)],
        MigrationSpec(link=LINK, wanted=wanted),
    )
    assert record.moves == {}
    assert record.requests[0].engine == 0


def test_what_engines_cannot_do_is_refused() -> None:
    specs = [make_spec(), make_spec()]
    with pytest.raises(ConfigError, match="engine 2 cannot be drained: there are 2, from 0"):
        run(specs, [], MigrationSpec(drains=[(1.0, 2)]))
    with pytest.raises(ConfigError, match="engine 3 cannot take requests"):
        run(specs, [], MigrationSpec(wanted=[(1.0, "r0", 3, LIVE)]))
    with pytest.raises(ConfigError, match="to keep its requests"):
        Simulation(specs, OpenLoop([]), migrations=MigrationSpec(), lock_step=True)


def number_of(line: str) -> str:
    return line.partition(":")[0]


times = st.floats(0, 2, width=16)
engines = st.integers(0, 2)
wishes = st.tuples(
    times,
    st.integers(0, 39).map("r{}".format),
    st.one_of(st.none(), engines),
    st.sampled_from(MigrationMethod),
)


@given(
    seed=st.integers(0, 1000),
    wanted=st.lists(wishes, max_size=30),
    drains=st.lists(st.tuples(times, engines), max_size=2),
    deaths=st.lists(st.tuples(times, engines), max_size=4),
    link=st.sampled_from([Link(1e4, 0.01), LINK, Link(1e9, 0.0), None]),
    dispatch=st.sampled_from(["round-robin", "least-requests", "max-min"]),
    shape=st.sampled_from([(1, 1), (1, 4), (2, 1)]),
    mode=st.sampled_from(["recompute", "swap"]),
    ticks=st.booleans(),
)
@settings(max_examples=examples(150))
def test_nothing_is_lost_and_skipping_ahead_changes_nothing(
    seed: int,
    wanted: list[tuple[float, str, int | None, MigrationMethod]],
    drains: list[tuple[float, int]],
    deaths: list[tuple[float, int]],
    link: Link | None,
    dispatch: str,
    shape: tuple[int, int],
    mode: str,
    ticks: bool,
) -> None:
    depth, iterations = shape
    times = TICKS if ticks else TIMES
    specs = [make_spec(60, times=times, depth=depth, max_iterations=iterations, preemption_mode=mode)] * 3
    requests = make_workload(24, rate=60, seed=seed)
    if ticks:
        tick_ns = round(TICK_S * SECOND)
        requests = [replace(each, arrival_ns=each.arrival_ns // tick_ns * tick_ns) for each in requests]
        wanted = [(time // TICK_S * TICK_S, *wish) for time, *wish in wanted]
    migrations = MigrationSpec(link=link, drains=drains, wanted=wanted)
    records, logs = [], []
    for skip_ahead in (True, False):
        log: list[str] = []
        records.append(
            run(specs, requests, migrations, deaths=deaths, dispatch=dispatch, skip_ahead=skip_ahead, log=log)
        )
        logs.append(log)
    if not deaths:
        assert records[0] == records[1]
        assert sorted(logs[0], key=number_of) == sorted(logs[1], key=number_of)
    assert records[0].requests == records[1].requests
    served = {row.request_id: row.output_tokens for row in records[0].requests if row.finish == "stop"}
    if len({engine for _, engine in drains}) < 2:
        assert served == {request.id: request.true_output_tokens for request in requests}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_s", [38 * TICK_S, 38.02 * TICK_S])
def test_a_request_that_leaves_at_the_end_of_a_step_leaves_the_next_to_be_planned(
    at_s: float, depth: int
) -> None:
    specs = [make_spec(400, times=TICKS, depth=depth) for _ in range(2)]
    requests = [make_request(number, 10, (200, 10)[number % 2]) for number in range(3)]
    requests += [make_request(number, 10, 15, at_s=(38 + number / 50) * TICK_S) for number in (3, 20)]
    migrations = MigrationSpec(wanted=[(at_s, "r0", 1, TOKENS)])
    on, off = (
        run(specs, requests, migrations, skip_ahead=skip, dispatch="round-robin") for skip in (True, False)
    )
    assert on == off


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_s", [0.1002, 0.1302])
def test_a_rejected_request_is_tried_again_when_blocks_of_a_migrated_one_are_free(
    at_s: float, depth: int
) -> None:
    """With two plans in flight that is a step after it left."""
    specs = [
        make_spec(blocks, times=TICKS, depth=depth, block_size=4, prefix_caching=False)
        for blocks in (40, 400)
    ]
    requests = [
        make_request(0, 80, 150),
        make_request(1, 4, 5),
        make_request(2, 30, 100, at_s=0.01),
        make_request(3, 4, 5, at_s=0.01),
        make_request(4, 60, 20, at_s=0.05),
    ]
    migrations = MigrationSpec(wanted=[(at_s, "r0", 1, TOKENS)])
    on, off = (
        run(specs, requests, migrations, skip_ahead=skip, dispatch="round-robin") for skip in (True, False)
    )
    assert on == off
