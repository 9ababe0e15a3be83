"""The life of single requests: refusal, ends, cancellation, depth."""

from dataclasses import replace

import pytest
from schedule_builders import make_pool, make_request, make_scheduler, run

from shoal.core import (
    NO_TOKEN,
    Failure,
    FinishReason,
    Idle,
    InvalidRequest,
    StepPlan,
    StepResult,
    SyntheticPrompt,
    TokenLogprobs,
)
from shoal.kvcache import hash_blocks
from shoal.schedule import Aggressive, PastFuture, request_state


def step(scheduler, *tokens):
    plan = scheduler.schedule(0)
    return scheduler.update(plan, StepResult.of_step(list(tokens), 10), 0)


@pytest.mark.parametrize(
    ("request_", "param", "code", "message"),
    [
        (make_request(0), "prompt", None, "at least one token"),
        (make_request(40), "prompt", "context_length_exceeded", "at most 39"),
        (make_request(10, max_tokens=31), "max_tokens", "context_length_exceeded", "at most 30"),
        (make_request(10, min_tokens=31), "min_tokens", "context_length_exceeded", "at most 30"),
        (make_request(service="b"), "model", "model_not_found", "available: a"),
    ],
)
def test_what_can_never_fit_is_refused(request_, param, code, message):
    scheduler = make_scheduler(make_pool(10), context=100)
    with pytest.raises(InvalidRequest, match=message) as caught:
        scheduler.submit(request_, 0)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert scheduler.unfinished == 0


def test_the_context_limits_too():
    scheduler = make_scheduler(context=12)
    assert scheduler.max_output_tokens("a", 10) == 2
    scheduler.submit(make_request(10, max_tokens=2), 0)
    with pytest.raises(InvalidRequest, match="12 tokens"):
        scheduler.submit(make_request(12), 0)


def test_the_whole_pool_is_what_the_service_could_hold_of_it():
    scheduler = make_scheduler(make_pool(5, per_merged={"a": 1, "b": 3}))
    assert (scheduler.max_output_tokens("a", 1), scheduler.max_output_tokens("b", 1)) == (19, 59)


def test_choices_of_a_call_have_their_prompt_hashed_once(monkeypatch):
    hashed = []
    monkeypatch.setattr(
        request_state, "hash_blocks", lambda *given: hashed.append(given) or hash_blocks(*given)
    )
    scheduler, first = make_scheduler(), make_request([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2)
    scheduler.submit_all([replace(first, id=f"r-{choice}") for choice in range(3)], 0)
    assert len(hashed) == 1
    assert len(scheduler.schedule(0).joined) == 1  # the others wait until its prompt is there
    with pytest.raises(InvalidRequest):
        scheduler.submit_all([replace(first, id="new"), replace(first, id="r-1")], 0)
    assert scheduler.unfinished == 3


def test_an_id_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.submit(make_request(id="x"), 0)
    with pytest.raises(InvalidRequest, match="'x' is in use"):
        scheduler.submit(make_request(id="x"), 0)


def test_a_request_that_fills_the_pool_is_served():
    scheduler = make_scheduler(make_pool(5), admission=Aggressive(watermark=0.5))
    done = run(scheduler, [make_request(17, None, id="x")])
    assert (len(done.tokens["x"]), done.ends["x"]) == (3, FinishReason.LENGTH)


def test_an_end_of_sequence_token_ends_the_output_and_is_named():
    scheduler = make_scheduler(eos=(2,))
    scheduler.submit(make_request(3, None, id="x"), 0)
    assert step(scheduler, 7)[0].finish is None
    (event,) = step(scheduler, 2)
    assert (event.tokens, event.finish, event.stop_token) == ((2,), FinishReason.STOP, 2)
    assert scheduler.unfinished == 0


def test_min_tokens_and_ignore_eos_hold_it_off():
    scheduler = make_scheduler(eos=(2,))
    scheduler.submit(make_request(3, None, id="x", min_tokens=2), 0)
    scheduler.submit(make_request(3, None, id="y", ignore_eos=True, stop_token_ids=(9,)), 0)
    assert [event.finish for event in step(scheduler, 2, 2)] == [None, None]
    assert [event.finish for event in step(scheduler, 2, 2)] == [FinishReason.STOP, None]
    assert [event.stop_token for event in step(scheduler, 9)] == [9]


def test_logprobs_go_with_their_tokens():
    scheduler = make_scheduler()
    scheduler.submit(make_request(3, None, id="x"), 0)
    scheduler.submit(make_request(3, None, id="y", logprobs=0), 0)
    plan = scheduler.schedule(0)
    known = TokenLogprobs(8, -0.5)
    events = scheduler.update(plan, StepResult.of_step([7, 8], 1, [None, known]), 0)
    assert [event.logprobs for event in events] == [None, (known,)]


def test_a_waiting_request_is_cancelled_at_once():
    scheduler = make_scheduler()
    scheduler.submit(make_request(id="x"), 0)
    event = scheduler.cancel("x", 0)
    assert event is not None
    assert (event.request_id, event.finish) == ("x", FinishReason.CANCELLED)
    assert scheduler.unfinished == 0
    assert scheduler.cancel("x", 0) is None
    assert scheduler.schedule(0) == Idle()


def test_a_running_request_between_plans_is_cancelled_at_once():
    pool = make_pool()
    scheduler = make_scheduler(pool)
    scheduler.submit(make_request(id="x"), 0)
    scheduler.submit(make_request(id="y"), 0)
    step(scheduler, 1, 2)
    event = scheduler.cancel("x", 0)
    assert event is not None
    assert pool.live_blocks("a") == 3
    assert scheduler.schedule(0).left == (0,)


def test_a_request_in_flight_is_cancelled_at_the_update():
    pool = make_pool()
    scheduler = make_scheduler(pool)
    scheduler.submit(make_request(id="x"), 0)
    plan = scheduler.schedule(0)
    assert scheduler.cancel("x", 0) is None
    assert pool.live_blocks("a") == 3
    (event,) = scheduler.update(plan, StepResult.of_step([7], 1), 0)
    assert (event.tokens, event.finish) == ((), FinishReason.CANCELLED)
    assert pool.live_blocks("a") == 0


def test_with_depth_two_a_decode_is_scheduled_before_its_input_is_known():
    pool = make_pool()
    scheduler = make_scheduler(pool, depth=2, eos=(2,))
    scheduler.submit(make_request(3, None, id="x"), 0)
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    assert (second.seq_ids, second.new_tokens, second.joined) == ((0,), (1,), ())
    assert scheduler.schedule(0) == Idle()
    assert scheduler.in_flight == 2
    (event,) = scheduler.update(first, StepResult.of_step([2], 1), 0)
    assert event.finish is FinishReason.STOP
    # The token after the end is dropped, and the blocks go only now.
    assert pool.live_blocks("a") == 1
    assert scheduler.update(second, StepResult.of_step([7], 1), 0) == []
    assert pool.live_blocks("a") == 0


def test_nothing_is_scheduled_beyond_max_tokens():
    scheduler = make_scheduler(depth=2)
    scheduler.submit(make_request(3, None, max_tokens=2), 0)
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    assert isinstance(second, StepPlan)
    scheduler.update(first, StepResult.of_step([7], 1), 0)
    assert scheduler.schedule(0) == Idle()
    (event,) = scheduler.update(second, StepResult.of_step([7], 1), 0)
    assert event.finish is FinishReason.LENGTH


def test_plans_are_updated_in_order_and_in_full():
    scheduler = make_scheduler(depth=2)
    scheduler.submit(make_request(3, None), 0)
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    with pytest.raises(ValueError, match="oldest in flight is 0"):
        scheduler.update(second, StepResult.of_step([7], 1), 0)
    with pytest.raises(ValueError, match="samples 1 tokens, got 2"):
        scheduler.update(first, StepResult.of_step([7, 7], 1), 0)


def test_a_synthetic_prompt_has_a_length_and_shares_by_its_hashes():
    scheduler = make_scheduler(max_running=1)
    done = run_synthetic(scheduler, SyntheticPrompt(9, (11, 12)), SyntheticPrompt(10, (11, 13)))
    joined = [sequence for plan in done for sequence in plan.joined]
    assert [(len(sequence.tokens), sequence.computed) for sequence in joined] == [(9, 0), (10, 4)]


def run_synthetic(scheduler, *prompts):
    plans = []
    for prompt in prompts:
        scheduler.submit(make_request(prompt, 2), 0)
    while scheduler.unfinished:
        plans.append(scheduler.schedule(0))
        scheduler.update(plans[-1], StepResult.of_step([0] * len(plans[-1].sampled), 1), 0)
    return plans


def test_service_time_is_that_of_the_steps_a_request_took_part_in():
    scheduler = make_scheduler()
    scheduler.submit(make_request(id="x"), 0)
    step(scheduler, 7)
    scheduler.submit(make_request(id="y"), 0)
    step(scheduler, 7, 7)
    running = scheduler.services["a"].running
    assert [request.request.id for request in running.requests] == ["x", "y"]
    assert running.service_time_ns.tolist() == [20, 10]


def test_unfilled_tokens_are_the_slots_that_tables_have_beyond_what_is_scheduled():
    scheduler = make_scheduler(make_pool(20, block_size=4))
    for length in (5, 8):
        scheduler.submit(make_request(length, None, max_tokens=20), 0)
    unfilled = []
    for _ in range(4):
        plan = scheduler.schedule(0)
        unfilled.append(scheduler.stats().services["a"].unfilled_tokens)
        scheduler.update(plan, StepResult.of_step([7] * len(plan.sampled), 1), 0)
    # Of 8 and 8 slots 5 and 8 are used; then a block more for the second, filled a token at a time.
    assert unfilled == [3, 2 + 3, 1 + 2, 0 + 1]
    for request in list(scheduler.services["a"].running.requests):
        scheduler.cancel(request.request.id, 0)
    assert scheduler.stats().services["a"].unfilled_tokens == 0


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_request_whose_text_is_complete_ends_as_stopped_and_its_length_is_remembered(in_flight):
    scheduler = make_scheduler(admission=PastFuture(cold_start="max", window=4))
    scheduler.submit(make_request(id="x", output=None), 0)
    step(scheduler, 1)
    step(scheduler, 2)
    if in_flight:
        plan = scheduler.schedule(0)
        assert scheduler.cancel("x", 0, FinishReason.STOP) is None
        (event,) = scheduler.update(plan, StepResult.of_step([3], 1), 0)
    else:
        event = scheduler.cancel("x", 0, FinishReason.STOP)
    assert event is not None
    assert event.finish is FinishReason.STOP
    counted = scheduler.stats().services["a"]
    assert (counted.finished, counted.cancelled) == (1, 0)
    assert 2 in scheduler._services["a"].statistics.history._recent


def test_a_request_whose_constraints_exclude_every_token_is_invalid():
    scheduler = make_scheduler(make_pool())
    scheduler.submit(make_request(8, id="x"), 0)
    plan = scheduler.schedule(0)
    failures = {0: Failure("its limits leave none", FinishReason.INVALID)}
    [event] = scheduler.update(plan, StepResult([[NO_TOKEN]], [1], failures=failures), 0)
    assert (event.finish, event.error) == (FinishReason.INVALID, "its limits leave none")
    counted = scheduler.stats().services["a"]
    assert (counted.finished, counted.cancelled) == (0, 1)


def test_a_row_without_a_token_fails_alone_and_publishes_nothing():
    pool = make_pool()
    scheduler = make_scheduler(pool)
    scheduler.submit(make_request(8, id="x"), 0)
    scheduler.submit(make_request(8, id="y"), 0)
    plan = scheduler.schedule(0)
    bad, good = scheduler.update(plan, StepResult.of_step([NO_TOKEN, 7], 1), 0)
    assert (bad.request_id, bad.tokens, bad.finish) == ("x", (), FinishReason.ERROR)
    assert "not finite" in bad.error
    assert (good.tokens, good.finish) == ((7,), None)
    assert pool.usage().services["a"].cached_blocks == 0
    assert scheduler.stats().services["a"].finished == 0
    assert scheduler.unfinished == 1


def test_a_prompt_whose_last_chunk_is_one_token_is_no_prompt_afterwards():
    pool = make_pool(64, per_merged={"a": 1, "b": 1})
    scheduler = make_scheduler(pool, max_batched_tokens=8, max_running=2)
    scheduler.submit(make_request(9, 50, service="a", id="first"), 0)
    step(scheduler)
    step(scheduler, 1)
    scheduler.submit(make_request(4, 5, service="b", id="older"), 0)
    scheduler.submit(make_request(4, 5, service="a", id="younger"), 0)
    assert scheduler.schedule(0).service == "b"
