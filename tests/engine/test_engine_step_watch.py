"""When a step counts as too long."""

import pytest

from shoal.core import StepPlan
from shoal.engine.step_watch import LEAST_LIMIT_S, Overdue, PresentStep, StepWatch


class Clock:
    now_ns = 0

    def __call__(self):
        return self.now_ns

    def sleep(self, seconds):
        self.now_ns += round(seconds * 1e9)


def plan(number, tokens, iterations=1):
    return StepPlan(
        number=number,
        service="a",
        seq_ids=(0,),
        new_tokens=(tokens,),
        sampled=(0,),
        iterations=iterations,
    )


def test_the_limit_follows_the_mean_of_steps_of_that_size():
    clock = Clock()
    watch = StepWatch(clock)
    assert watch.present is None
    for number, seconds in enumerate([4.0, 2.0]):
        watch.begin(plan(number, 1000))
        assert watch.present == PresentStep(number, max(LEAST_LIMIT_S, 20 * 4.0 * number))
        clock.sleep(seconds)
        watch.end()
        assert watch.present is None
    watch.begin(plan(2, 600))
    assert watch.present.limit_s == pytest.approx(60)
    watch.end()
    watch.begin(plan(3, 400))
    assert watch.present.limit_s == LEAST_LIMIT_S
    watch.end()
    watch.begin(plan(4, 1, iterations=700))
    assert watch.present.limit_s == pytest.approx(20 * (4 + 2 + 0) / 3)


def test_the_oldest_of_two_plans_is_timed_from_the_end_of_the_one_before():
    clock = Clock()
    watch = StepWatch(clock)
    watch.begin(plan(0, 1))
    clock.sleep(1)
    watch.begin(plan(1, 100))
    clock.sleep(2)
    assert watch.present.plan == 0
    watch.end()
    assert watch.present.plan == 1
    clock.sleep(5)
    watch.end()
    for tokens, mean_s in ((1, 3), (100, 5)):
        watch.begin(plan(2, tokens))
        assert watch.present.limit_s == max(LEAST_LIMIT_S, 20 * mean_s)
        watch.end()


def test_a_step_is_overdue_by_what_was_seen_of_it():
    overdue = Overdue(most_s=2.0)
    step = PresentStep(7, 30.0)
    assert overdue.look(None, 100) == 0
    assert overdue.look(step, 100) == 0
    assert [overdue.look(step, 2.0) for _ in range(15)] == [0.0] * 15
    assert overdue.look(step, 1.0) == 1.0
    assert overdue.look(step, 1000.0) == 3.0, "a process that slept has seen nothing"
    assert overdue.look(PresentStep(8, 30.0), 1.0) == 0
    assert overdue.look(PresentStep(8, 30.0), 1.0) == 0
