"""Runs of decode steps that need no decision: when there are some, and how many."""

import pytest
from schedule_builders import STEP_NS, make_pool, make_request, make_scheduler
from test_schedule_iterations import committed, steps_left, submitted
from test_schedule_random import STEP_S

from shoal.core import StepResult
from shoal.schedule import Aggressive, Conservative, Oracle, PastFuture, Slice, WeightedTurns


def test_a_run_ends_with_the_first_request_that_does():
    scheduler = submitted(make_scheduler(), make_request(3, 8), make_request(5, 5))
    assert steps_left(scheduler) == 4
    assert steps_left(scheduler, most=3) == 3


def test_a_run_ends_at_the_end_of_a_slice():
    scheduler = make_scheduler(make_pool(40, block_size=1), admission=Slice(tokens=4))
    submitted(scheduler, make_request(3, 20), make_request(5, 20))
    assert steps_left(scheduler) == 3


def test_a_run_ends_before_a_request_outgrows_its_prediction():
    scheduler = submitted(make_scheduler(), make_request(3, 20))
    batch = scheduler.services["a"].running
    batch.predicted_tokens[0] = 6
    # With the 6th token it has as many as were predicted and has not ended.
    assert steps_left(scheduler) == 4
    batch.predicted_tokens[0] = 20
    assert steps_left(scheduler) == 19


def test_a_run_ends_before_a_request_starves():
    scheduler = submitted(
        make_scheduler(starvation_s=10 * STEP_S), make_request(3, 100), make_request(3, 100)
    )
    assert scheduler.decode_runs.next_run(2 * STEP_NS, 100).until_ns == (1 + 10) * STEP_NS


def test_a_run_takes_no_more_memory_than_there_is():
    scheduler = submitted(
        make_scheduler(make_pool(6, block_size=4)), make_request(3, 20), make_request(3, 20)
    )
    # Both have 3 tokens in the pool; 19 steps, halved once, fill its 24 slots.
    assert steps_left(scheduler) == 9
    committed(scheduler, 9)
    assert scheduler.pool.live_blocks("a") == 6


@pytest.mark.parametrize(
    ("admission", "steps"),
    [
        (Oracle(), 0),
        (Oracle(admit_every=4), 2),
        (PastFuture(), 0),
        (PastFuture(admit_every=4), 2),
        (Conservative(), 18),
        (Aggressive(watermark=0.3), 18),
        (Aggressive(watermark=0.3, admit_every=4), 2),
    ],
    ids=str,
)
def test_a_run_ends_before_a_request_could_be_admitted(admission, steps):
    """It ends before the next admission or, if running requests only grow, before one of them ends."""
    scheduler = make_scheduler(make_pool(14, block_size=4), admission=admission)
    for _ in range(3):
        scheduler.submit(make_request(5, 20, max_tokens=20), 0)
    for step in range(2):
        plan = scheduler.schedule(step * STEP_NS)
        result = StepResult.of_step([1] * len(plan.sampled), STEP_NS)
        scheduler.update(plan, result, (step + 1) * STEP_NS)
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    assert steps_left(scheduler, 2 * STEP_NS) == steps


def test_there_is_no_run_where_the_next_step_is_something_else():
    scheduler = submitted(make_scheduler(), make_request(3, 20))
    plan = scheduler.schedule(STEP_NS)
    assert steps_left(scheduler) == 0, "a plan is in flight"
    scheduler.update(plan, StepResult.of_step([1], STEP_NS), 2 * STEP_NS)
    assert steps_left(scheduler, 2 * STEP_NS) > 0
    scheduler.submit(make_request(3, 20), 2 * STEP_NS)
    assert steps_left(scheduler, 2 * STEP_NS) == 0, "a prompt waits"

    scheduler = make_scheduler(depth=2)
    scheduler.submit(make_request(3, 20), 0)
    prompt = scheduler.schedule(0)
    assert steps_left(scheduler) == 0, "a prompt is in flight"
    decodes = scheduler.schedule(0)
    scheduler.update(prompt, StepResult.of_step([1], STEP_NS), STEP_NS)
    assert steps_left(scheduler, STEP_NS) == 18, "a decode is in flight, and 18 are left"
    scheduler.cancel(scheduler.request_ids[0], STEP_NS)
    assert steps_left(scheduler, STEP_NS) == 0, "the plan in flight ends a request"
    scheduler.update(decodes, StepResult.of_step([1], STEP_NS), 2 * STEP_NS)
    assert not scheduler.unfinished

    scheduler = make_scheduler(max_batched_tokens=4)
    scheduler.submit(make_request(6, 20), 0)
    scheduler.update(scheduler.schedule(0), StepResult.of_step([], STEP_NS), STEP_NS)
    assert steps_left(scheduler) == 0, "a prompt is being computed"

    scheduler = make_scheduler(make_pool(per_merged={"a": 1, "b": 1}))
    for service in "ab":
        scheduler.submit(make_request(3, 20, service=service), 0)
        scheduler.update(scheduler.schedule(0), StepResult.of_step([1], STEP_NS), STEP_NS)
    assert steps_left(scheduler) == 0, "two services decode"

    scheduler = make_scheduler(order=WeightedTurns(), max_running=1)
    for _ in range(2):
        scheduler.submit(make_request(3, 20), 0)
    scheduler.update(scheduler.schedule(0), StepResult.of_step([1], STEP_NS), STEP_NS)
    assert steps_left(scheduler) == 0, "the order may put them elsewhere"
    assert scheduler.decode_runs.next_run(STEP_NS, 0) is None
