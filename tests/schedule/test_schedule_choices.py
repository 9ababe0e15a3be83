"""Choices of one call compute their prompt once: the others begin with the blocks of the first."""

from dataclasses import replace

import pytest
from replay_executor import ReplayExecutor
from schedule_builders import Run, make_pool, make_request, make_scheduler, run

from shoal.core import FinishReason, StepPlan

PROMPT, OUTPUT, BLOCK = 22, 6, 4


def choices_of(request, count):
    return [replace(request, id=f"{request.id}-{number}", seed=number) for number in range(count)]


def submit_first(scheduler, *calls):
    for call in calls:
        scheduler.submit_all(call, 0)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [7, 2048])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt", [PROMPT, 24])
def test_a_prompt_is_computed_once_for_all_choices(prefix_caching, budget, depth, prompt):
    request = make_request(prompt, OUTPUT)
    alone = run(make_scheduler(), [replace(request, id="alone")])
    pool = make_pool(64, prefix_caching=prefix_caching)
    scheduler = make_scheduler(pool, max_batched_tokens=budget, depth=depth)
    submit_first(scheduler, choices_of(request, 4))
    done = run(scheduler)
    assert all(tokens == alone.tokens["alone"] for tokens in done.tokens.values())
    assert len(done.tokens) == 4
    # Of the prompt the others compute what does not fill a block, or its last token.
    tail = prompt % BLOCK or 1
    assert done.computed_tokens == alone.computed_tokens + 3 * (tail + OUTPUT - 1)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_requests_behind_the_choices_do_not_wait_for_their_prompt(prefix_caching):
    pool = make_pool(64, prefix_caching=prefix_caching)
    scheduler = make_scheduler(pool, max_batched_tokens=64)
    submit_first(scheduler, choices_of(make_request(40, OUTPUT), 3), [make_request(8, OUTPUT, id="behind")])
    plan = scheduler.schedule(0)
    assert [len(joined.tokens) for joined in plan.joined] == [40, 8]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("steps", [1, 4])
def test_cancelling_the_first_choice_does_not_affect_the_others(prefix_caching, steps):
    """Within its prompt (after one step), the next computes it; after it, its blocks are there."""
    request = make_request(PROMPT, OUTPUT)
    alone = run(make_scheduler(), [replace(request, id="alone")])
    scheduler = make_scheduler(make_pool(64, prefix_caching=prefix_caching), max_batched_tokens=7)
    choices = choices_of(request, 3)
    submit_first(scheduler, choices)

    def cancel(made: int, done: Run) -> None:
        if made == steps:
            event = scheduler.cancel(choices[0].id, 0)
            done.take([event] if event is not None else [])

    cancelled = []

    def before(made: int, done: Run) -> bool:
        if made == steps and not cancelled:
            cancelled.append(made)
            cancel(made, done)
        return False

    done = run(scheduler, before_step=before)
    assert done.ends[choices[0].id] is FinishReason.CANCELLED
    for choice in choices[1:]:
        assert done.tokens[choice.id] == alone.tokens["alone"]
    # Of two that are left one at most computed the prompt again.
    assert done.computed_tokens <= 2 * PROMPT + 3 * (PROMPT % BLOCK + OUTPUT)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_are_preempted_and_come_back(mode, prefix_caching):
    """Memory for one of them and a half, so that they lose their blocks, the shared ones among them."""
    request = make_request(PROMPT, 30)
    alone = run(make_scheduler(), [replace(request, id="alone")])
    pool = make_pool(24, prefix_caching=prefix_caching)
    scheduler = make_scheduler(pool, preemption_mode=mode, host_blocks=40)
    submit_first(scheduler, choices_of(request, 4))
    done = run(scheduler)
    assert sum(service.preemptions for service in scheduler.stats().services.values()) > 0
    assert all(tokens == alone.tokens["alone"] for tokens in done.tokens.values())


def test_equal_prompts_of_different_calls_are_not_shared():
    """Without a prefix cache."""
    request = make_request(PROMPT, OUTPUT)
    scheduler = make_scheduler(make_pool(64, prefix_caching=False))
    for choice in choices_of(request, 2):
        scheduler.submit_all([choice], 0)
    plan = scheduler.schedule(0)
    assert [joined.computed for joined in plan.joined] == [0, 0]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("prompt", [3, 8, 41])
def test_the_other_choices_join_when_the_prompt_is_computed(prefix_caching, prompt):
    """A prompt that fills no block is not waited for."""
    scheduler = make_scheduler(make_pool(200, prefix_caching=prefix_caching))
    submit_first(scheduler, choices_of(make_request(prompt, OUTPUT), 6))
    joined = [len(plan.joined) for plan in run(scheduler).plans if plan.joined]
    assert joined == ([6] if prompt < BLOCK else [1, 5])


def test_for_a_starved_choice_the_one_that_computes_the_prompt_goes_first():
    """An endless stream of short requests of another service must not keep a long prompt from its end."""
    pool = make_pool(400, per_merged={"a": 1, "b": 1}, prefix_caching=False)
    scheduler = make_scheduler(pool, order="weighted-turns", starvation_s=1e-4, max_batched_tokens=16)
    call = choices_of(make_request(200, 5, service="a"), 2)
    scheduler.submit_all(call, 0)
    executor, now, ended = ReplayExecutor(pool), 0, set()
    for _ in range(2_500):
        while scheduler.stats().services["b"].running + scheduler.stats().services["b"].waiting < 3:
            scheduler.submit(make_request(3, 3, service="b"), now)
        plan = scheduler.schedule(now)
        assert isinstance(plan, StepPlan)
        result = executor.run(plan)
        now += result.duration_ns
        ended |= {event.request_id for event in scheduler.update(plan, result, now) if event.finish}
    assert {choice.id for choice in call} <= ended


def test_one_prompt_object_in_two_services_makes_no_choices():
    pool = make_pool(64, per_merged={"a": 1, "b": 1}, prefix_caching=False)
    scheduler = make_scheduler(pool)
    request = make_request(PROMPT, OUTPUT)
    scheduler.submit_all([request, replace(request, id="other", service="b")], 0)
    assert len(run(scheduler).tokens) == 2


def test_ended_choices_are_not_referenced():
    scheduler = make_scheduler(make_pool(64))
    choices = choices_of(make_request(PROMPT, OUTPUT), 3)
    submit_first(scheduler, choices)
    kept = list(scheduler._store.requests.values())
    run(scheduler)
    assert all(not state.choices for state in kept)
