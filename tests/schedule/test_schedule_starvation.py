"""Starvation: under an endless stream of requests a long one is served in bounded time."""

import math
from itertools import pairwise

import pytest
from schedule_builders import STEP_NS, make_pool, make_request, make_scheduler
from test_schedule_random import ORDER_POINTS

from crossed import crossed
from shoal.core import Idle, StepPlan, StepResult
from shoal.schedule import (
    Aggressive,
    Conservative,
    DoublingBudget,
    PastFuture,
    Predicted,
    ShortestRemaining,
)
from shoal.schedule.starvation import next_starvation_ns, starving

STEP_S = STEP_NS / 1e9
SERVICES = {"a": 1, "b": 1, "c": 1}
THRESHOLD_STEPS = 12
STEPS = 10 * THRESHOLD_STEPS


def waits(order, admission, preemption, starved="a", threshold=THRESHOLD_STEPS, of=None):
    """Steps until the first of a long request of each ``starved`` service, and the longest time between two.

    of: thresholds of services, in steps. Service c gets two new short requests before every step, which alone
    would fill the pool without end.
    """
    scheduler = make_scheduler(
        make_pool(24, per_merged=SERVICES, prefix_caching=False),
        order=order,
        admission=admission,
        starvation_s=threshold * STEP_S,
        execution_s=2 * STEP_S,
        starvation_of={name: steps * STEP_S for name, steps in (of or {}).items()},
        **preemption,
    )
    now, steps, ended = 0, {name: [0] for name in starved}, set()
    for _ in range(12):
        scheduler.submit(make_request(5, 3, service="c", max_tokens=4), now)
    for name in starved:
        scheduler.submit(make_request(40, 30, service=name, id=name, max_tokens=30), now)
    for _ in range(STEPS):
        for _ in range(2):
            scheduler.submit(make_request(5, 3, service="c", max_tokens=4), now)
        plan = scheduler.schedule(now)
        assert not isinstance(plan, Idle)
        now += STEP_NS
        events = scheduler.update(plan, StepResult.of_step([7] * len(plan.sampled), STEP_NS), now)
        ended |= {event.request_id for event in events if event.finish}
        if plan.service in steps:
            steps[plan.service].append(now // STEP_NS)
    for name in steps.keys() - ended:
        steps[name].append(now // STEP_NS)
    first = max(times[1] for times in steps.values())
    return first, max(after - before for times in steps.values() for before, after in pairwise(times))


@pytest.mark.parametrize(
    ("preemption", "admission", "order"),
    crossed(
        [{"preemption_mode": "swap", "preempt_for_waiting": "less-urgent"}, {}],
        [Aggressive(), PastFuture(), Predicted(), Conservative()],
        ORDER_POINTS,
    ),
    ids=str,
)
def test_the_wait_of_a_long_request_is_bounded(preemption, admission, order):
    """threshold + (starved services ahead + 1) longest steps; preempting takes no step of its own here.

    c's own queue grows for ever, so that c counts among the starved.
    """
    _, longest = waits(order, admission, preemption)
    assert longest <= THRESHOLD_STEPS + 2
    # Two of them do not fit together; the one preempted for the other waits longer each time.
    first, longest = waits(order, admission, preemption, starved="ab")
    assert first <= THRESHOLD_STEPS + 3
    assert longest <= 4 * THRESHOLD_STEPS + 3


@pytest.mark.parametrize("order", [DoublingBudget(variant="batch"), ShortestRemaining()], ids=str)
def test_without_the_guard_it_would_starve(order):
    """The test above tests something: with a threshold that is never reached, the request never runs."""
    assert waits(order, Aggressive(), {}, threshold=10_000) == (STEPS, STEPS)


def test_a_starved_running_request_is_served_once_per_threshold():
    scheduler = make_scheduler(make_pool(64), order="fcfs", starvation_s=STEP_NS / 2e9)
    scheduler.submit(make_request(4, 20), 0)
    for step in range(3):
        plan = scheduler.schedule(step * STEP_NS)
        scheduler.update(plan, StepResult.of_step([5] * len(plan.sampled), STEP_NS), (step + 1) * STEP_NS)
    late_ns = 10 * STEP_NS
    assert isinstance(scheduler.schedule(late_ns), StepPlan)
    assert scheduler._services["a"].starved_served_ns == late_ns


def test_a_service_may_have_a_threshold_of_its_own():
    short, never = THRESHOLD_STEPS // 3, 1e6
    order, preemption = ShortestRemaining(), {"preemption_mode": "swap", "preempt_for_waiting": "never"}
    assert waits(order, Aggressive(), preemption, of={"a": short})[1] <= short + 2
    assert waits(order, Aggressive(), preemption, threshold=never, of={"a": short})[1] <= short + 2
    # The pool's threshold is that of services without one.
    assert waits(order, Aggressive(), preemption, of={"c": never})[1] <= THRESHOLD_STEPS + 2
    assert waits(order, Aggressive(), preemption, of={"a": never})[1] > 2 * THRESHOLD_STEPS


def test_each_service_starves_at_its_own_time():
    scheduler = make_scheduler(
        make_pool(per_merged={"a": 1, "b": 1}), starvation_s=8 * STEP_S, starvation_of={"b": 3 * STEP_S}
    )
    scheduler.submit_all([make_request(4, 9, service=name, id=name) for name in "ab"], 0)
    states = scheduler._services.values()
    assert not starving(states, 3 * STEP_NS - 1)
    assert [request.service for request in starving(states, 3 * STEP_NS)] == ["b"]
    assert [request.service for request in starving(states, 8 * STEP_NS)] == ["b", "a"]
    assert next_starvation_ns(states) == 3 * STEP_NS


def test_a_threshold_may_be_endless():
    scheduler = make_scheduler(make_pool(), starvation_of={"a": math.inf})
    scheduler.submit(make_request(4, 9, service="a"), 0)
    assert not starving(scheduler._services.values(), 10**18)
