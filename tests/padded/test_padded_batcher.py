"""The global batcher: when it forms batches, for which workers, and that no request is lost; presets."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_builders import (
    ROOMY,
    FakeWorkers,
    Job,
    Run,
    Swift,
    ids,
    make_request,
    make_requests,
    memory_of,
    random_jobs,
)

from experiments.padded.batcher import Assignment, GlobalBatcher
from experiments.padded.interval import AdaptiveInterval, FixedInterval, WhenIdle
from experiments.padded.offload import OFFLOADERS
from experiments.padded.options import StaticOptions
from experiments.padded.presets import STATIC_ENGINES, STATIC_PRESETS, static_preset
from hypothesis_profiles import examples
from shoal.batches import FORMERS, MemoryByBytes, MemoryByRule, MemoryLimit
from shoal.core import ConfigError, InvalidRequest

SECOND = 1_000_000_000
LADDER = ["sls", "so", "pm", "ab", "lb", "scls"]


def make_batcher(options: StaticOptions, workers: int = 1, memory: MemoryLimit = ROOMY) -> GlobalBatcher:
    return GlobalBatcher(options, Swift(), memory, workers=workers)


def every(seconds: float, *, max_batch: int | None = None, offloader: str = "round-robin") -> StaticOptions:
    return StaticOptions(
        former=FORMERS["fixed"],
        offloader=OFFLOADERS[offloader],
        interval=FixedInterval(seconds),
        slice_tokens=16,
        max_batch=max_batch,
    )


def members(assignments: list[Assignment]) -> list[list[str]]:
    return ids([assignment.batch for assignment in assignments])


def test_batches_are_formed_at_the_interval() -> None:
    batcher = make_batcher(every(6.0))
    assert batcher.next_ns is None
    batcher.submit(make_request(0))
    assert members(batcher.dispatch(2 * SECOND)) == [["r0"]]
    batcher.submit(make_request(1))
    assert batcher.next_ns == 8 * SECOND
    assert batcher.dispatch(8 * SECOND - 1) == []
    batcher.submit(make_request(2))
    assert members(batcher.dispatch(8 * SECOND)) == [["r1", "r2"]]
    assert batcher.next_ns is None
    # The interval has passed long ago: at once.
    batcher.submit(make_request(3))
    assert members(batcher.dispatch(99 * SECOND)) == [["r3"]]


def test_looking_often_changes_nothing() -> None:
    batcher = make_batcher(every(6.0))
    batcher.submit(make_request(0))
    batcher.dispatch(0)
    batcher.submit(make_request(1))
    for now in range(0, 6 * SECOND, SECOND // 2):
        assert batcher.dispatch(now) == []
    assert members(batcher.dispatch(6 * SECOND)) == [["r1"]]


def test_an_adaptive_interval_grows_with_the_least_load() -> None:
    options = replace(every(0.0, max_batch=1), interval=AdaptiveInterval(1.0, factor=0.5))
    batcher = make_batcher(options, workers=2)
    for request in make_requests(*[1000] * 40):
        batcher.submit(request)
    batcher.dispatch(0)
    least = min(batcher.loads)
    assert least > 2.0
    batcher.submit(make_request(99))
    assert batcher.next_ns == round(0.5 * least * 1e9)


def test_a_load_falls_by_the_estimate_of_what_was_finished() -> None:
    batcher = make_batcher(every(1.0, max_batch=1, offloader="max-min"), workers=2)
    for request in make_requests(400, 300, 200):
        batcher.submit(request)
    first, second, third = batcher.dispatch(0)
    assert [assignment.worker for assignment in (first, second, third)] == [0, 1, 1]
    assert batcher.loads[1] == pytest.approx(second.batch.estimate_s + third.batch.estimate_s)
    batcher.finished(second, [], 77 * SECOND)  # it took far longer than estimated
    assert batcher.loads[1] == pytest.approx(third.batch.estimate_s)
    batcher.finished(third, [], 78 * SECOND)
    assert batcher.loads[1] == 0.0
    assert batcher.completed_ns == (None, 78 * SECOND)


def test_unfinished_requests_return_to_the_end_of_the_pool() -> None:
    batcher = make_batcher(every(1.0, max_batch=2))
    for request in make_requests(10, 10):
        batcher.submit(request)
    (assignment,) = batcher.dispatch(0)
    batcher.submit(make_request(2))
    batcher.finished(assignment, [assignment.batch.requests[1].after(16)], SECOND)
    assert (batcher.pending, batcher.unfinished) == (2, 2)
    (again,) = batcher.dispatch(SECOND)
    assert members([again]) == [["r2", "r1"]]
    assert (again.batch.input_tokens, again.batch.requests[1].slices) == (26, 1)


def test_without_a_pool_each_worker_serves_whom_it_was_dealt() -> None:
    batcher = make_batcher(static_preset("sls"), workers=2)
    for request in make_requests(*[10] * 40):
        batcher.submit(request)
    assert batcher.next_ns == 0
    first, second = batcher.dispatch(0)
    assert members([first]) == [[f"r{number}" for number in range(0, 32, 2)]]
    assert members([second]) == [[f"r{number}" for number in range(1, 32, 2)]]
    assert batcher.next_ns is None
    assert batcher.dispatch(0) == []
    batcher.finished(second, [], SECOND)
    assert members(batcher.dispatch(SECOND)) == [["r33", "r35", "r37", "r39"]]


def test_a_failed_batch_returns_as_it_was() -> None:
    batcher = make_batcher(every(1.0))
    batcher.submit(make_request(0))
    (assignment,) = batcher.dispatch(0)
    batcher.finished(assignment, assignment.batch.requests, SECOND)
    (again,) = batcher.dispatch(SECOND)
    assert again.batch == assignment.batch
    assert again.number != assignment.number


@pytest.mark.parametrize("preset", ["sls", "scls"])
def test_a_pending_request_can_be_removed(preset: str) -> None:
    batcher = make_batcher(static_preset(preset))
    batcher.submit(make_request(0))
    batcher.dispatch(0)
    batcher.submit(make_request(1))
    load = batcher.loads[0]
    assert not batcher.remove("r0")
    assert batcher.remove("r1")
    assert not batcher.remove("r1")
    assert batcher.loads[0] <= load
    assert (batcher.pending, batcher.unfinished) == (0, 1)
    batcher.submit(make_request(1))


def test_what_can_never_fit_is_refused() -> None:
    batcher = make_batcher(every(1.0), memory=memory_of(100))
    with pytest.raises(InvalidRequest, match="60 input and up to 41 output tokens") as refusal:
        batcher.submit(make_request(0, tokens=60, remaining=41))
    assert refusal.value.param == "max_tokens"
    batcher.submit(make_request(0, tokens=60, remaining=40))
    assert batcher.unfinished == 1


def test_wrong_reports_are_refused() -> None:
    batcher = make_batcher(every(1.0))
    batcher.submit(make_request(0))
    with pytest.raises(ValueError, match="unfinished already"):
        batcher.submit(make_request(0))
    (assignment,) = batcher.dispatch(0)
    with pytest.raises(ValueError, match="not distinct members"):
        batcher.finished(assignment, [make_request(7)], 0)
    batcher.finished(assignment, [], 0)
    with pytest.raises(ValueError, match="no unfinished assignment"):
        batcher.finished(assignment, [], 0)
    with pytest.raises(ValueError, match="at least one worker"):
        make_batcher(every(1.0), workers=0)


def check(run: Run, jobs: list[Job], options: StaticOptions, memory: MemoryLimit) -> None:
    """What must hold after every run: all ended once with all their tokens, no batch over a limit."""
    assert sorted(run.ended) == sorted(job.request.id for job in jobs)
    assert run.generated == {job.request.id: job.output for job in jobs}
    assert run.total("useful_tokens") == sum(job.output for job in jobs)
    assert set(run.loads_at_end) <= {0.0}
    for assignment, _ in run.served:
        batch = assignment.batch
        assert memory.fits(len(batch), batch.input_tokens, batch.iterations)
        assert options.max_batch is None or len(batch) <= options.max_batch
        assert options.slice_tokens is None or batch.iterations <= options.slice_tokens


@st.composite
def jobs_of(draw: st.DrawFn) -> list[Job]:
    jobs = []
    for number in range(draw(st.integers(1, 25))):
        remaining = draw(st.integers(1, 300))
        request = make_request(
            number,
            tokens=draw(st.integers(1, 300)),
            remaining=remaining,
            predicted=draw(st.integers(1, remaining)),
            slo_s=draw(st.one_of(st.none(), st.floats(0.5, 100))),
            arrival_ns=draw(st.integers(0, 20 * SECOND)),
        )
        jobs.append(Job(request, draw(st.integers(1, remaining))))
    return jobs


@pytest.mark.parametrize("engine", STATIC_ENGINES)
@pytest.mark.parametrize("preset", STATIC_PRESETS)
@settings(max_examples=examples(8), deadline=None)
@given(jobs=jobs_of(), workers=st.integers(1, 3), room=st.sampled_from([600, 2_000, 20_000]))
def test_no_request_is_lost(preset: str, engine: str, jobs: list[Job], workers: int, room: int) -> None:
    options = static_preset(preset, engine)
    memory = MemoryByRule() if STATIC_ENGINES[engine].by_rule else memory_of(room)
    check(FakeWorkers(options, jobs, workers=workers, memory=memory).to_the_end(), jobs, options, memory)


@pytest.mark.parametrize("former", FORMERS)
@pytest.mark.parametrize("offloader", OFFLOADERS)
@settings(max_examples=examples(6), deadline=None)
@given(
    jobs=jobs_of(),
    interval=st.sampled_from([WhenIdle(), FixedInterval(0.0), FixedInterval(2.0), AdaptiveInterval(1.0)]),
    slice_tokens=st.sampled_from([None, 1, 50]),
    max_batch=st.sampled_from([None, 1, 4]),
    trust=st.booleans(),
)
def test_any_combination_ends(
    former: str,
    offloader: str,
    jobs: list[Job],
    interval: WhenIdle | FixedInterval | AdaptiveInterval,
    slice_tokens: int | None,
    max_batch: int | None,
    trust: bool,
) -> None:
    options = StaticOptions(
        former=FORMERS[former],
        offloader=OFFLOADERS[offloader],
        interval=interval,
        slice_tokens=slice_tokens,
        max_batch=max_batch,
        trust_predictions=trust,
    )
    memory = memory_of(2_000)
    check(FakeWorkers(options, jobs, workers=2, memory=memory).to_the_end(), jobs, options, memory)


def test_each_rung_of_the_ladder_adds_one_thing() -> None:
    hf = {name: static_preset(name, "hf") for name in LADDER}
    assert hf["sls"] == StaticOptions(
        former=FORMERS["fixed"], offloader=OFFLOADERS["round-robin"], interval=WhenIdle(), max_batch=16
    )
    assert hf["so"] == replace(hf["sls"], slice_tokens=128)
    assert hf["pm"] == replace(hf["so"], former=FORMERS["scls"], interval=FixedInterval(6.0))
    assert hf["ab"] == replace(hf["pm"], max_batch=None)
    assert hf["lb"] == replace(hf["ab"], offloader=OFFLOADERS["max-min"])
    assert hf["scls"] == replace(hf["lb"], interval=AdaptiveInterval(6.0, factor=0.5))
    assert [static_preset(name, "ds").max_batch for name in LADDER] == [12, 12, 12, None, None, None]
    assert static_preset("scls", "ds").interval == AdaptiveInterval(3.0, factor=0.5)


def test_uellm_and_its_baselines_differ_in_the_former() -> None:
    uellm = static_preset("uellm")
    assert uellm.trust_predictions
    assert (uellm.former, uellm.max_batch) == (FORMERS["slo-odbs"], 16)
    for name in ("odbs", "slo-dbs"):
        assert static_preset(name) == replace(uellm, former=FORMERS[name])
    assert static_preset("uellm-literal") == replace(uellm, former=FORMERS["slo-odbs-literal"])
    assert static_preset("s3") == replace(uellm, former=FORMERS["s3"], max_batch=None)
    assert static_preset("fifo") == replace(uellm, former=FORMERS["fixed"], trust_predictions=False)


def test_the_engines_memory() -> None:
    hf = STATIC_ENGINES["hf"].memory(token_bytes=819_200, available_bytes=50 << 30)
    assert hf == MemoryByBytes(token_bytes=819_200, available_bytes=50 << 30, zeta=0.9)
    assert STATIC_ENGINES["ds"].memory(token_bytes=1, available_bytes=1) == MemoryByRule()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"static preset 'orca' is not known; .*possible are"):
        static_preset("orca")
    with pytest.raises(ConfigError, match=r"static engine 'vllm' is not known; .*possible are ds, hf"):
        static_preset("sls", "vllm")


def spread(batcher: GlobalBatcher) -> float:
    """Seconds between the first and the last worker's last end."""
    ends = [end_ns for end_ns in batcher.completed_ns if end_ns is not None]
    return (max(ends) - min(ends)) / SECOND


def test_the_ladder_does_what_its_names_say() -> None:
    """SCLS, Figs. 15-17, in kind: each rung's own figure improves under overload on one seeded workload."""
    jobs = random_jobs(1, 600, per_second=20.0)
    memory = MemoryByBytes(token_bytes=819_200, available_bytes=50 << 30)
    runs, spreads, ends = {}, {}, {}
    for name in LADDER:
        options = static_preset(name, "hf")
        workers = FakeWorkers(options, jobs, workers=3, memory=memory)
        runs[name] = workers.to_the_end()
        check(runs[name], jobs, options, memory)
        spreads[name] = spread(workers.batcher)
        ends[name] = workers.now
    assert runs["so"].total("invalid_tokens") < runs["sls"].total("invalid_tokens") / 2
    assert runs["pm"].total("pad_tokens") < runs["so"].total("pad_tokens") / 2
    assert runs["ab"].mean_batch > 1.5 * runs["pm"].mean_batch
    assert runs["scls"].mean_batch > runs["lb"].mean_batch
    assert max(ends["scls"], ends["ab"]) < ends["pm"] < ends["so"] < ends["sls"]
    assert spreads["scls"] < spreads["sls"]


def test_max_min_loads_workers_more_evenly_than_turns() -> None:
    loads = {}
    for name in ("ab", "lb"):
        batcher = make_batcher(static_preset(name), workers=3, memory=memory_of(20_000))
        for job in random_jobs(3, 200, per_second=1e9):
            batcher.submit(job.request)
        batcher.dispatch(SECOND)
        loads[name] = batcher.loads
    assert sum(loads["lb"]) == pytest.approx(sum(loads["ab"]))
    assert max(loads["lb"]) - min(loads["lb"]) < max(loads["ab"]) - min(loads["ab"])


@pytest.mark.parametrize("preset", ["odbs", "uellm"])
def test_similar_lengths_together_waste_less_than_first_come_first_served(preset: str) -> None:
    jobs = random_jobs(2, 300, per_second=20.0)
    wasted = {}
    for name in ("fifo", preset):
        options = replace(static_preset(name), trust_predictions=True)
        run = FakeWorkers(options, jobs, workers=2).to_the_end()
        wasted[name] = run.total("invalid_tokens")
    assert wasted[preset] < wasted["fifo"] / 2
