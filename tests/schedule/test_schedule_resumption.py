"""Requests that come with output already made, and requests that are taken out in the middle."""

from dataclasses import replace

import pytest
from schedule_builders import SECOND, make_pool, make_request, make_scheduler, run

from shoal.core import SLO, FinishReason, Idle, InvalidRequest, ResumeState, StepResult, SyntheticPrompt
from shoal.schedule import PastFuture


def step(scheduler, *tokens, now_ns=0):
    plan = scheduler.schedule(now_ns)
    return scheduler.update(plan, StepResult.of_step(list(tokens), 10), now_ns)


def carry(request, output, **carried):
    return replace(
        request,
        output_tokens=output,
        resume_state=ResumeState(**{"max_new_tokens": 5, "num_admissions": 1} | carried),
    )


def test_the_executor_sees_the_same_as_after_a_preemption():
    scheduler = make_scheduler(make_pool(16))
    scheduler.submit(carry(make_request([1, 2, 3, 4, 5], None, temperature=0.5), (7, 8)), 0)
    (joined,) = scheduler.schedule(0).joined
    assert (joined.tokens, joined.prompt_tokens, joined.computed) == ((1, 2, 3, 4, 5, 7, 8), 5, 0)


def test_its_kv_is_found_prompt_and_output():
    scheduler = make_scheduler()
    request = make_request(6, None, id="x", max_tokens=20)
    scheduler.submit(request, 0)
    for token in range(8):
        step(scheduler, token)
    moved = scheduler.detach("x", 0)
    assert moved.output_tokens == tuple(range(8))
    scheduler.submit(moved, 0)
    (joined,) = scheduler.schedule(0).joined
    assert joined.computed == 12  # of 14, the newest not computed: three blocks of 4


def test_events_have_only_new_tokens_and_counts_include_old_ones():
    ended = []
    scheduler = make_scheduler(admission=PastFuture(cold_start="max", window=4))
    scheduler._store._on_end = lambda state, reason, now_ns: ended.append((state, now_ns))
    request = carry(
        make_request([1, 2, 3], None, id="x"),
        (7, 8, 9),
        age_ns=100 * SECOND,
        first_token_age_ns=60 * SECOND,
        last_token_age_ns=10 * SECOND,
        largest_gap_ns=15 * SECOND,
        service_time_ns=SECOND,
        num_cached_tokens=2,
        num_preemptions=4,
        num_preempted_by_starvation=1,
        num_recomputed_tokens=11,
    )
    scheduler.submit(request, 1_000 * SECOND)
    (event,) = step(scheduler, 5, now_ns=1_008 * SECOND)
    assert (event.tokens, event.finish, event.cached_tokens) == ((5,), None, 2)
    (event,) = step(scheduler, 6, now_ns=1_030 * SECOND)
    assert (event.tokens, event.finish, event.cached_tokens) == ((6,), FinishReason.LENGTH, 2)
    [(state, now_ns)] = ended
    assert (state.num_generated, state.num_preemptions, state.num_preempted_by_starvation) == (5, 4, 1)
    assert (state.arrival_ns, state.first_token_ns) == (900 * SECOND, 940 * SECOND)
    # 18 s from the last token there to the first here, then 22.
    assert state.largest_gap_ns == 22 * SECOND
    assert state.service_time_ns == SECOND + 20
    assert state.num_recomputed_tokens == 11 + 5
    traffic = scheduler.observed(now_ns)["a"].traffic
    assert (traffic.output_tokens.mean, traffic.latency_s, traffic.ttft_s) == (5, 130, 40)
    assert traffic.arrivals_per_s == 0
    assert 5 in scheduler._services["a"].statistics.history._recent
    counted = scheduler.stats().services["a"]
    assert (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens) == (0, 0, 2)


def test_the_first_gap_begins_with_the_last_token_before_resumption():
    scheduler = make_scheduler()
    request = carry(make_request([1, 2], None, id="x"), (7,), last_token_age_ns=9 * SECOND)
    scheduler.submit(request, 50 * SECOND)
    step(scheduler, 5, now_ns=60 * SECOND)
    assert scheduler.services["a"].running.largest_gap_ns.tolist() == [19 * SECOND]


def test_output_without_a_past_counts_as_known_on_arrival():
    scheduler = make_scheduler()
    request = replace(make_request([1, 2], None, id="x", max_tokens=4), output_tokens=(7, 8), arrival_ns=5)
    scheduler.submit(request, 20)
    step(scheduler, 3, now_ns=30)
    running = scheduler.services["a"].running
    assert (running.first_token_ns.tolist(), running.largest_gap_ns.tolist()) == ([5], [25])
    counted = scheduler.stats().services["a"]
    assert (counted.prompt_tokens, counted.cached_tokens) == (2, 0)
    assert scheduler.observed(30)["a"].traffic.arrivals_per_s > 0
    (event,) = step(scheduler, 4, now_ns=40)
    assert (event.tokens, event.finish) == ((4,), FinishReason.LENGTH)


def test_no_more_than_the_prompt_counts_as_cached():
    scheduler = make_scheduler()
    run(scheduler, [make_request([1, 2, 3, 4, 5, 6, 7, 8, 9], None, max_tokens=1)])
    scheduler.submit(replace(make_request([1, 2, 3, 4, 5], None, id="x"), output_tokens=(6, 7, 8)), 0)
    (event,) = step(scheduler, 1)
    assert event.cached_tokens == 5
    assert scheduler.stats().services["a"].cached_tokens == 5


@pytest.mark.parametrize("order", ["fcfs", "mlfq", "doubling-budget"])
def test_its_place_in_the_queue_is_by_arrival(order):
    scheduler = make_scheduler(order=order, max_running=1)
    scheduler.submit(make_request(4, 9, id="runs"), 0)
    scheduler.schedule(0)
    for name, arrival_ns in (("first", 10), ("second", 20), ("also second", 20)):
        scheduler.submit(replace(make_request(4, 5, id=name), arrival_ns=arrival_ns), 30)
    scheduler.submit(carry(make_request(4, 5, id="between"), (), age_ns=15), 30)
    scheduler.submit(carry(make_request(4, 5, id="oldest"), (), age_ns=100), 30)
    waiting = [request.request.id for request in scheduler.services["a"].waiting]
    assert waiting == ["oldest", "first", "between", "second", "also second"]
    for name in ("between", "oldest", "second"):
        scheduler.cancel(name, 30)
    assert [request.request.id for request in scheduler.services["a"].waiting] == ["first", "also second"]


def test_waiting_time_on_another_engine_counts_for_starvation():
    scheduler = make_scheduler(starvation_s=20.0, max_running=1)
    scheduler.submit(make_request(4, None, id="runs", max_tokens=90), 0)
    step(scheduler, 1)
    waited = carry(make_request(4, 5, id="waited"), (), age_ns=15 * SECOND, num_admissions=0)
    scheduler.submit(waited, 100 * SECOND)
    assert scheduler.services["a"].waiting[0].last_scheduled_ns == 85 * SECOND
    served = carry(make_request(4, 5, id="served"), (3,), age_ns=15 * SECOND, last_token_age_ns=5 * SECOND)
    scheduler.submit(served, 100 * SECOND)
    assert scheduler.services["a"].waiting[1].last_scheduled_ns == 95 * SECOND


@pytest.mark.parametrize(
    ("output", "sampling", "finish", "stop_token"),
    [
        ((7, 8, 9, 7, 8), {}, FinishReason.LENGTH, None),
        ((7, 2), {}, FinishReason.STOP, 2),
        ((7, 9), {"stop_token_ids": (9,)}, FinishReason.STOP, 9),
        ((7, 9), {"stop_token_ids": (9,), "min_tokens": 3}, None, None),
        ((7, 2), {"ignore_eos": True}, None, None),
        ((2, 7), {"min_tokens": 2}, None, None),
    ],
)
def test_complete_output_ends_at_once(output, sampling, finish, stop_token):
    pool = make_pool()
    scheduler = make_scheduler(pool, eos=(2,))
    request = make_request(3, None, id="x", **sampling)
    events = scheduler.submit(carry(request, output, num_cached_tokens=3), 0)
    if finish is None:
        assert events == []
        assert scheduler.unfinished == 1
        return
    (event,) = events
    assert (event.request_id, event.tokens, event.finish, event.stop_token) == ("x", (), finish, stop_token)
    assert event.cached_tokens == 3
    assert scheduler.unfinished == 0
    assert scheduler.schedule(0) == Idle()
    assert scheduler.observed(0)["a"].traffic.output_tokens.mean == len(output)


def test_a_synthetic_request_is_resumed_with_a_count():
    scheduler = make_scheduler(depth=2)
    scheduler.submit(make_request(SyntheticPrompt(9), 6, id="x"), 0)
    for _ in range(3):
        plan = scheduler.schedule(0)
        scheduler.update(plan, StepResult.of_step([-2], 10), 0)
    moved = scheduler.detach("x", 0)
    assert moved.output_tokens == 3
    assert scheduler.detach("x", 0) is None
    assert scheduler.submit(replace(moved, output_tokens=6, id="done"), 0)[0].finish is FinishReason.STOP
    scheduler.submit(moved, 0)
    (joined,) = scheduler.schedule(0).joined
    assert (len(joined.tokens), joined.prompt_tokens) == (12, 9)


def test_choices_go_on_with_their_prompt_computed_once():
    scheduler = make_scheduler(make_pool(prefix_caching=False))
    prompt = list(range(8))
    first = carry(make_request(prompt, None, id="x-0"), (1, 2))
    scheduler.submit_all([first, replace(first, id="x-1", output_tokens=(3,))], 0)
    plan = scheduler.schedule(0)
    assert [len(joined.tokens) for joined in plan.joined] == [10]
    scheduler.update(plan, StepResult.of_step([5], 1), 0)
    (joined,) = scheduler.schedule(0).joined
    assert (joined.tokens, joined.computed) == ((*prompt, 3), 8)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_detached_request_leaves_nothing_behind(in_flight):
    pool = make_pool()
    scheduler = make_scheduler(pool, depth=2)
    scheduler.submit(make_request(8, None, id="x"), 0)
    scheduler.submit(make_request(8, None, id="y"), 0)
    step(scheduler, 1, 2)
    plan = scheduler.schedule(0) if in_flight else None
    moved = scheduler.detach("x", 40)
    assert moved.output_tokens == (1,)
    state = moved.resume_state
    assert (state.max_new_tokens, state.num_admissions) == (64 * 4 - 8, 1)
    assert (state.age_ns, state.first_token_age_ns, state.last_token_age_ns) == (40, 40, 40)
    assert scheduler.unfinished == 1
    if plan is not None:
        events = scheduler.update(plan, StepResult.of_step([3, 4], 1), 50)
        assert [event.request_id for event in events] == ["y"]
    assert pool.live_blocks("a") == (3 if in_flight else 2)
    counted = scheduler.stats().services["a"]
    assert (counted.running, counted.waiting, counted.finished, counted.cancelled) == (1, 0, 0, 0)


def test_a_request_about_to_end_is_not_detached():
    scheduler = make_scheduler()
    scheduler.submit(make_request(8, None, id="x"), 0)
    plan = scheduler.schedule(0)
    scheduler.cancel("x", 0)
    assert scheduler.detach("x", 0) is None
    (event,) = scheduler.update(plan, StepResult.of_step([3], 1), 0)
    assert event.finish is FinishReason.CANCELLED
    assert scheduler.detach("unknown", 0) is None


def test_swapped_kv_is_given_up_with_its_request():
    scheduler = make_scheduler(make_pool(6), preemption_mode="swap")
    scheduler.submit(make_request(8, None, id="old", max_tokens=12), 0)
    scheduler.submit(make_request(8, None, id="young", max_tokens=12), 0)
    while not scheduler.stats().services["a"].swapped:
        plan = scheduler.schedule(0)
        scheduler.update(plan, StepResult.of_step([7] * len(plan.sampled), 1), 0)
    moved = scheduler.detach("young", 0)
    assert (len(moved.output_tokens), moved.resume_state.num_preemptions) == (5, 1)
    assert scheduler.host.live_blocks("a") == 0


SYNTHETIC = make_request(SyntheticPrompt(3), None)


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (carry(make_request(30, None), (1,), max_new_tokens=11), "max_tokens", "up to 11 .* at most 10"),
        (carry(make_request(3, None), (1,) * 6), "output_tokens", "has 6 tokens, .* at most 5"),
        (replace(make_request(38, None), output_tokens=(1,) * 3), "output_tokens", "has 3 .* at most 2"),
        (replace(make_request(3, None), output_tokens=2), "output_tokens", "token ids where the prompt is"),
        (replace(SYNTHETIC, output_tokens=(1,)), "output_tokens", "a number where the prompt is"),
    ],
)
def test_a_request_that_cannot_be_resumed_is_refused(request_, param, message):
    scheduler = make_scheduler(make_pool(10), context=100)
    with pytest.raises(InvalidRequest, match=message) as caught:
        scheduler.submit_all([make_request(3, None), request_], 0)
    assert caught.value.param == param
    assert scheduler.unfinished == 0


def test_the_most_tokens_of_before_hold_on_a_larger_engine():
    scheduler = make_scheduler(make_pool(60), context=1_000)
    moved = carry(make_request(3, None, id="x"), (1, 2, 3), max_new_tokens=4)
    scheduler.submit(moved, 0)
    (event,) = step(scheduler, 9)
    assert (event.tokens, event.finish) == ((9,), FinishReason.LENGTH)


def test_a_resumed_request_is_not_refused_for_its_goals():
    scheduler = make_scheduler(max_running=1, on_hopeless="refuse")
    scheduler.submit(make_request(4, None, id="runs", max_tokens=90), 0)
    step(scheduler, 1)
    late = replace(make_request(4, 5), slo=SLO(ttft_s=1.0), arrival_ns=0)
    scheduler.submit(replace(late, id="new"), 9 * SECOND)
    scheduler.submit(carry(replace(late, id="resumed"), (), age_ns=9 * SECOND), 9 * SECOND)
    step(scheduler, 2, now_ns=9 * SECOND)
    assert [event.request_id for event in scheduler.take_refused()] == ["new"]
    assert [request.request.id for request in scheduler.services["a"].waiting] == ["resumed"]
