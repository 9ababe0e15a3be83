"""Choices of one call compute their prompt once: the others begin with the blocks of the first."""

from dataclasses import replace

import pytest
from schedule_builders import Run, make_pool, make_request, make_scheduler, run

from shoal.core import FinishReason

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
def test_who_comes_behind_the_choices_does_not_wait_for_their_prompt(prefix_caching):
    pool = make_pool(64, prefix_caching=prefix_caching)
    scheduler = make_scheduler(pool, max_batched_tokens=64)
    submit_first(scheduler, choices_of(make_request(40, OUTPUT), 3), [make_request(8, OUTPUT, id="behind")])
    plan = scheduler.schedule(0)
    assert [len(joined.tokens) for joined in plan.joined] == [40, 8]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_first_that_is_cancelled_takes_nobody_with_it(prefix_caching, steps):
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
    assert sum(service.evictions for service in scheduler.stats().services.values()) > 0
    assert all(tokens == alone.tokens["alone"] for tokens in done.tokens.values())


def test_equal_prompts_of_different_calls_are_strangers():
    """Without a prefix cache nobody looks for them."""
    request = make_request(PROMPT, OUTPUT)
    scheduler = make_scheduler(make_pool(64, prefix_caching=False))
    for choice in choices_of(request, 2):
        scheduler.submit_all([choice], 0)
    plan = scheduler.schedule(0)
    assert [joined.computed for joined in plan.joined] == [0, 0]
