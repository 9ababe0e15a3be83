"""The sample of steps that an engine keeps, against the plans that its executor got."""

from collections import Counter

import pytest
from engine_builders import make_engine, make_request, run_all

from shoal.core import StepPlan, StepResult
from shoal.core.step import BlockCopy
from shoal.engine.step_samples import StepSamples


def record_plans(engine) -> list[tuple[str, int, int, tuple[tuple[int, int], ...]]]:
    """(service, decodes, context, chunks) of each plan with rows, counted from the plans alone."""
    plans, computed = [], {}
    submit = engine.fake_executor.submit

    def record(plan, interrupted=lambda: False):
        for sequence in plan.left:
            computed.pop(sequence, None)
        for joined in plan.joined:
            computed[joined.seq_id] = joined.computed
        rows = [
            (count, computed[sequence]) for sequence, count in zip(plan.seq_ids, plan.new_tokens, strict=True)
        ]
        for sequence, count in zip(plan.seq_ids, plan.new_tokens, strict=True):
            computed[sequence] += count
        if rows:
            decodes = [before + 1 for count, before in rows if count == 1]
            chunks = tuple((count, before) for count, before in rows if count > 1)
            plans.append((plan.service, len(decodes), sum(decodes), chunks))
        submit(plan, interrupted)

    engine.fake_executor.submit = record
    return plans


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_are_steps_as_they_ran(depth):
    engine, _ = make_engine(
        "fake", "fake", blocks=200, scheduler={"depth": depth, "max_batched_tokens": 16, "max_iterations": 1}
    )
    plans = record_plans(engine)
    for number in range(30):
        engine.submit(
            make_request(f"r{number}", prompt=1 + 5 * number % 23, service="ab"[number % 2], max_tokens=12)
        )
    run_all(engine)
    samples = engine.step_samples()
    assert set(samples) == {"a", "b"}
    kept = Counter(
        (service, each.decodes, each.decode_context, each.chunks)
        for service, own in samples.items()
        for each in own
    )
    assert kept
    assert not kept - Counter(plans)
    assert any(each.chunks for each in samples["a"])
    assert any(not each.chunks and each.decodes > 1 for each in samples["a"])
    assert all(each.seconds > 0 for own in samples.values() for each in own)


class _Computed:
    """As many tokens computed before as ``tokens`` says, for each row; counts its calls."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.calls = 0

    def computed_before(self, plan):
        self.calls += 1
        return None if self.tokens is None else [self.tokens] * len(plan.seq_ids)


def plan_of(*new_tokens: int, **fields) -> StepPlan:
    rows = range(len(new_tokens))
    return StepPlan(
        number=0, service="a", seq_ids=tuple(rows), new_tokens=new_tokens, sampled=tuple(rows), **fields
    )


def result_of(*durations_ns: int, rows: int = 1, **fields) -> StepResult:
    return StepResult([[1] * rows] * len(durations_ns), durations_ns, **fields)


def test_the_sample_is_bounded_and_the_first_of_each_size_is_left_out():
    scheduler = _Computed(9)
    samples = StepSamples(scheduler)
    for number in range(1000):
        samples.add(plan_of(1, 1, 1), result_of(number, rows=3), 0)
    kept = [round(each.seconds * 1e9) for each in samples.services["a"]]
    assert len(kept) == 24
    assert 0 not in kept
    assert kept[-1] > 980
    assert scheduler.calls < 100


def test_the_time_since_the_last_step_counts_where_the_engine_was_busy():
    samples = StepSamples(_Computed(9))
    for since_last_ns in (0, 0, 130, 70):
        samples.add(plan_of(1), result_of(100), since_last_ns)
    assert [round(each.seconds * 1e9) for each in samples.services["a"]] == [100, 130, 100]


def test_steps_of_a_busy_engine_include_its_other_work():
    engine, _ = make_engine("fake", blocks=200, scheduler={"max_iterations": 1})
    now_ns = 0

    def clock():
        nonlocal now_ns
        now_ns += 1000
        return now_ns

    engine._clock = clock
    for _ in range(2):
        engine.submit(make_request("r", prompt=3, max_tokens=20))
        run_all(engine)
        now_ns += 10**9  # it is idle
    decodes = [each for each in engine.step_samples()["a"] if not each.chunks]
    assert all(1e-6 <= each.seconds < 1e-4 for each in decodes)


def test_rare_sizes_keep_their_samples():
    samples = StepSamples(_Computed(9))
    for _ in range(2):
        samples.add(plan_of(200), result_of(50), 0)
    for _ in range(1000):
        samples.add(plan_of(1), result_of(7), 0)
    assert [each.chunks for each in samples.services["a"] if each.chunks] == [((200, 9),)]


def test_several_iterations_count_as_their_mean():
    samples = StepSamples(_Computed(9))
    for _ in range(2):
        samples.add(plan_of(1, 1, iterations=3), result_of(100, 200, 600, rows=2), 0)
    [kept] = samples.services["a"]
    # The rows attend 20, 22 and 24 positions.
    assert (kept.decodes, kept.decode_context, kept.seconds) == (2, 22, 300e-9)


@pytest.mark.parametrize(
    ("plan", "result"),
    [
        (plan_of(1, fetch=("w",)), result_of(1)),
        (plan_of(1, evict=("w",)), result_of(1)),
        (plan_of(1, copies=(BlockCopy("a", 0, 1),)), result_of(1)),
        (plan_of(1, swap_out_copies=(BlockCopy("a", 0, 1),)), result_of(1)),
        (plan_of(), result_of(1, rows=0)),
        (plan_of(1), result_of(1, counts=[1])),
        (plan_of(1), result_of(1, embeddings={0: b""})),
    ],
)
def test_steps_of_other_work_are_left_out(plan, result):
    samples = StepSamples(_Computed(9))
    for _ in range(3):
        samples.add(plan, result, 0)
    assert not samples.services.get("a")


def test_a_step_whose_request_has_left_is_left_out_and_so_is_a_removed_service():
    left = StepSamples(_Computed(None))
    here = StepSamples(_Computed(1))
    for samples in (left, here):
        for _ in range(3):
            samples.add(plan_of(1), result_of(1), 0)
    assert left.services == {"a": []}
    here.forget("a")
    assert here.services == {}
