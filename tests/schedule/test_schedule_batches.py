"""The admission ``batch``, and slices: limits on the output of one submission."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_builders import Run, make_pool, make_request, make_scheduler, run

from hypothesis_profiles import examples
from shoal.core import FinishReason, Request, ResumeState, SamplingParams, StepPlan, StepResult
from shoal.schedule import ORDERS, Aggressive, Batch, PastFuture, Scheduler


def of_batch(number: int | None, output: int = 5, *, id: str, **fields: object) -> Request:
    return replace(make_request(8, output, id=id, **fields), batch=number)  # type: ignore[arg-type]


def joined(plans: list[StepPlan]) -> list[int]:
    """How many requests join in each plan, without plans in which none does."""
    return [len(plan.joined) for plan in plans if plan.joined]


def spans(scheduler, requests: list[Request], **options) -> dict[str, tuple[int, int]]:
    """By request: the plans in which it joined and ended."""
    began: dict[str, int] = {}
    ended: dict[str, int] = {}
    plans = [0]

    def before_step(number: int, done: Run) -> bool:
        plans[0] = number
        for id in done.ends:
            ended.setdefault(id, number)
        return False

    def on_transition(request_id: str, runs: bool) -> None:
        if runs:
            began.setdefault(request_id, plans[0])

    scheduler.observe_transitions(on_transition)
    done = run(scheduler, requests, before_step=before_step, **options)
    for id in done.ends:
        ended.setdefault(id, len(done.plans))
    return {id: (began[id], ended[id]) for id in began}


def test_the_next_batch_begins_when_the_last_is_over():
    scheduler = make_scheduler(admission=Batch())
    requests = [
        of_batch(1, 9, id="a1"),
        of_batch(2, 3, id="b1"),
        of_batch(1, 4, id="a2"),
        of_batch(2, 3, id="b2"),
    ]
    found = spans(scheduler, requests)
    assert found["a1"][0] == found["a2"][0] == 0
    assert found["b1"][0] == found["b2"][0] == found["a1"][1]


def test_batches_run_in_the_order_of_their_numbers_whatever_came_first():
    scheduler = make_scheduler(admission=Batch())
    found = spans(scheduler, [of_batch(7, id="late"), of_batch(3, id="early")])
    assert found["early"][1] == found["late"][0]


def test_a_request_without_a_batch_is_one_of_its_own_and_the_last():
    scheduler = make_scheduler(admission=Batch())
    found = spans(scheduler, [of_batch(None, id="x"), of_batch(None, id="y"), of_batch(1, id="z")])
    assert found["z"][1] <= found["x"][0]
    assert found["x"][1] <= found["y"][0]


def test_a_batch_joins_over_as_many_chunks_as_it_needs():
    scheduler = make_scheduler(admission=Batch(), max_batched_tokens=16, max_running=16)
    requests = [of_batch(1, 9, id=f"r{number}") for number in range(5)] + [of_batch(2, id="other")]
    found = spans(scheduler, requests)
    assert len({found[f"r{number}"][0] for number in range(5)}) > 1
    assert found["other"][0] >= max(found[f"r{number}"][1] for number in range(5))


def test_a_member_that_arrives_late_still_joins_its_batch():
    scheduler = make_scheduler(admission=Batch(), max_iterations=8)

    def before_step(number: int, done: Run) -> bool:
        if number == 1:
            scheduler.submit(of_batch(1, 30, id="late"), 0)
        return number < 1

    done = run(
        scheduler,
        [of_batch(2, id="other"), of_batch(1, 40, id="first")],
        before_step=before_step,
        max_iterations=8,
    )
    assert joined(done.plans) == [1, 1, 1]
    ends = list(done.ends)
    assert ends == ["late", "first", "other"]


def test_a_preempted_member_comes_back_before_the_next_batch():
    # Three requests of 8 + 20 tokens in 16 blocks of 4: they start together and do not fit at their ends.
    scheduler = make_scheduler(make_pool(16), admission=Batch())
    requests = [of_batch(1, 20, id=f"r{number}") for number in range(3)] + [of_batch(2, 2, id="next")]
    found = spans(scheduler, requests)
    assert sum(service.preemptions for service in scheduler.stats().services.values()) > 0
    assert found["next"][0] >= max(found[f"r{number}"][1] for number in range(3))


def test_each_service_has_a_batch_of_its_own():
    scheduler = make_scheduler(make_pool(per_merged={"a": 1, "b": 1}), admission=Batch())
    requests = [
        of_batch(1, 30, id="a1"),
        of_batch(2, 2, id="a2"),
        of_batch(3, 2, id="b1", service="b"),
    ]
    found = spans(scheduler, requests)
    assert found["b1"][1] < found["a1"][1] <= found["a2"][0]


def test_a_cancelled_batch_lets_the_next_one_begin():
    scheduler = make_scheduler(admission=Batch())

    def before_step(number: int, done: Run) -> bool:
        if number == 3 and "first" not in done.ends:
            event = scheduler.cancel("first", 0)
            assert event is not None
            done.take([event])
        return False

    done = run(scheduler, [of_batch(1, 500, id="first"), of_batch(2, 2, id="next")], before_step=before_step)
    assert done.ends == {"first": FinishReason.CANCELLED, "next": FinishReason.STOP}
    assert len(done.plans) < 10


def test_a_starved_request_need_not_wait_for_its_batch():
    scheduler = make_scheduler(admission=Batch(), starvation_s=1e-5)
    found = spans(scheduler, [of_batch(1, 400, id="long"), of_batch(2, 2, id="starved")])
    assert found["starved"][1] < found["long"][1]


@settings(max_examples=examples(60), deadline=None)
@given(
    order=st.sampled_from(sorted(ORDERS)),
    blocks=st.sampled_from([12, 20, 64]),
    batches=st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=5), min_size=1, max_size=5),
    depth=st.sampled_from([1, 2]),
    mode=st.sampled_from(["recompute", "swap"]),
    max_batched_tokens=st.sampled_from([5, 16, 64]),
)
def test_batches_never_overlap_under_any_order(
    order: str, blocks: int, batches: list[list[int]], depth: int, mode: str, max_batched_tokens: int
):
    scheduler = make_scheduler(
        make_pool(blocks),
        admission=Batch(),
        order=order,
        depth=depth,
        preemption_mode=mode,
        max_batched_tokens=max_batched_tokens,
        starvation_s=1e6,
    )
    requests = [
        of_batch(number, output, id=f"{number}-{place}")
        for number, outputs in enumerate(batches)
        for place, output in enumerate(outputs)
    ]
    found = spans(scheduler, list(reversed(requests)))
    assert found.keys() == {request.id for request in requests}
    for number in range(len(batches) - 1):
        end = max(last for id, (_, last) in found.items() if id.startswith(f"{number}-"))
        begin = min(first for id, (first, _) in found.items() if id.startswith(f"{number + 1}-"))
        assert end <= begin


# Slices


def answer(scheduler: Scheduler, request: Request) -> tuple[list[int], FinishReason]:
    """New tokens of the only request, the n-th of its output is n, and how it ends."""
    scheduler.submit(request, 0)
    tokens: list[int] = []
    while True:
        plan = scheduler.schedule(0)
        assert isinstance(plan, StepPlan)
        result = StepResult.of_step([request.num_output_tokens + len(tokens)], 10)
        for event in scheduler.update(plan, result, 0):
            tokens += event.tokens
            if event.finish is not None:
                return tokens, event.finish


def test_a_submission_ends_with_its_slice_and_another_goes_on():
    scheduler = make_scheduler()
    request = replace(make_request(8, 30, id="r"), slice_tokens=12)
    made: list[int] = []
    ends = []
    while not ends or ends[-1] is FinishReason.SLICE:
        tokens, end = answer(scheduler, request)
        made += tokens
        ends.append(end)
        resumed = ResumeState(max_new_tokens=100, num_admissions=1)
        request = replace(request, output_tokens=tuple(made), resume_state=resumed)
    assert made == list(range(30))
    assert ends == [FinishReason.SLICE, FinishReason.SLICE, FinishReason.STOP]
    assert scheduler.stats().services["a"].cached_tokens == 0
    assert scheduler.stats().services["a"].prompt_tokens == 8


def test_a_slice_is_neither_finished_nor_cancelled_nor_learned_from():
    scheduler = make_scheduler(admission=PastFuture())
    run(scheduler, [replace(make_request(8, 30, id="r"), slice_tokens=5)])
    stats = scheduler.stats().services["a"]
    assert (stats.finished, stats.cancelled) == (0, 0)
    assert scheduler.services["a"].traits.mean_output_tokens is None


def test_a_long_gap_counts_once_at_the_end_of_a_request():
    scheduler = make_scheduler(max_token_gap_s=1e-6)
    late = ResumeState(max_new_tokens=100, num_admissions=1, largest_gap_ns=10**9)
    request = replace(make_request(8, 30, id="r"), output_tokens=(1, 2), resume_state=late)
    assert answer(scheduler, replace(request, slice_tokens=5))[1] is FinishReason.SLICE
    assert scheduler.stats().services["a"].long_token_gaps == 0
    assert answer(scheduler, request)[1] is FinishReason.STOP
    assert scheduler.stats().services["a"].long_token_gaps == 1


def test_a_limit_within_the_slice_ends_the_request():
    requests = [
        replace(make_request(8, None, id="length", max_tokens=5), slice_tokens=5),
        replace(make_request(8, 5, id="true"), slice_tokens=5),
        replace(make_request(8, None, id="slice", max_tokens=6), slice_tokens=5),
    ]
    assert run(make_scheduler(), requests).ends == {
        "length": FinishReason.LENGTH,
        "true": FinishReason.STOP,
        "slice": FinishReason.SLICE,
    }


def test_a_slice_goes_on_where_a_request_goes_that_leaves_in_the_middle():
    scheduler = make_scheduler()
    left: list[Request] = []

    def before_step(number: int, done: Run) -> bool:
        if number == 4 and not left:
            request = scheduler.detach("r", 0)
            assert request is not None
            left.append(request)
        return False

    run(scheduler, [replace(make_request(8, 30, id="r"), slice_tokens=12)], before_step=before_step)
    made = left[0].num_output_tokens
    assert 0 < made < 12
    assert left[0].slice_tokens == 12 - made
    tokens, end = answer(make_scheduler(), left[0])
    assert (made + len(tokens), end) == (12, FinishReason.SLICE)


def test_a_slice_shorter_than_the_least_output_ends_all_the_same():
    request = replace(
        make_request(8, None, id="r"),
        sampling=SamplingParams(min_tokens=20, max_tokens=30),
        slice_tokens=5,
    )
    done = run(make_scheduler(admission=Aggressive()), [request])
    assert (len(done.tokens["r"]), done.ends["r"]) == (5, FinishReason.SLICE)
