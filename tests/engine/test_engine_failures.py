"""Failed steps: rollback, retries, and errors of requests."""

import logging
from collections.abc import Callable

import pytest
from engine_builders import FakeExecutor, expected_tokens, make_engine, make_request, run_all

from shoal.core import EngineDied, FinishReason, StepPlan
from shoal.engine.core import Engine
from shoal.execute.protocol import Executor, StepFailed
from shoal.profile.measure import RowsRecorder

pytestmark = pytest.mark.failing_steps

POISON = 98
"""A prompt that begins with this token fails in every step."""


class FailingExecutor(FakeExecutor):
    """Fails for some plans, after computing a token of each row."""

    def __init__(self, layout, fails: Callable[[StepPlan, list[list[int]]], bool]) -> None:
        super().__init__(layout)
        self._fails = fails
        self._failed = False

    def submit(self, plan, interrupted=lambda: False):
        if not self.plans:
            self._failed = False
        super().submit(plan, interrupted)

    def _iterate(self, plan):
        if self._failed:
            raise StepFailed("the step before it failed")
        sequences = [self.sequences[number] for number in plan.seq_ids]
        if self._fails(plan, [sequence.tokens for sequence in sequences]):
            self._failed = True
            for sequence in sequences:
                self._compute(plan.service, sequence, 1)
            raise StepFailed("MemoryError: nothing is left")
        return super()._iterate(plan)


class RunsOn(FailingExecutor):
    """Wrongly runs the plans after a failed one."""

    def _iterate(self, plan):
        self._failed = False
        return super()._iterate(plan)


def failing_engine(fails, *models, kind=FailingExecutor, wrap=lambda executor: executor, **options) -> Engine:
    fake, _ = make_engine(*models, **options)
    executor: Executor = wrap(kind(fake.fake_executor.layout, fails))
    return Engine(fake._scheduler, fake.fake_pool, executor, depth=fake._scheduler.options.max_in_flight)


def poisoned(plan, prompts):
    return any(tokens[0] == POISON for tokens in prompts)


SCHEDULERS = [{"depth": 1}, {"depth": 2}, {"max_iterations": 4}]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=str)
@pytest.mark.parametrize("blocks", [24, 400])
def test_a_request_that_fails_alone_ends_with_an_error_and_the_rest_complete(scheduler, blocks, caplog):
    caplog.set_level(logging.WARNING)
    engine = failing_engine(poisoned, "fake", "fake", blocks=blocks, scheduler=scheduler)
    requests = [make_request(f"r{i}", prompt=2 + i, service="ab"[i % 2], max_tokens=12) for i in range(10)]
    bad = make_request("bad", prompt=[POISON, 100, 101], max_tokens=12)
    for request in [*requests[:6], bad, *requests[6:]]:
        engine.submit(request)
    events = run_all(engine)
    [end] = events.pop("bad")
    assert (end.finish, end.tokens) == (FinishReason.ERROR, ())
    assert "by itself: MemoryError: nothing is left" in end.error
    for request in requests:
        tokens = [token for event in events[request.id] for token in event.tokens]
        assert tokens == expected_tokens(request, 12)
        assert events[request.id][-1].finish is FinishReason.LENGTH
    stats = engine.stats()
    assert stats.services["a"].failed_steps == len(caplog.messages) > 1
    assert stats.services["b"].failed_steps == 0
    assert (stats.services["a"].finished, stats.services["a"].cancelled) == (5, 1)
    first, *_, last = caplog.messages
    assert first.startswith("a: a step with ")
    assert first.endswith("failed (MemoryError: nothing is left); its requests are tried in smaller steps")
    assert last == (
        "a: a step with 1 requests and 3 tokens failed (MemoryError: nothing is left);"
        " request bad ends, as it was alone in it"
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_cancelled_before_its_step_fails_ends_once(depth):
    failures = iter([False, False, True])
    engine = failing_engine(lambda plan, prompts: next(failures, False), scheduler={"depth": depth})
    engine.submit(make_request("goes", max_tokens=100))
    engine.submit(make_request("stays", max_tokens=10))
    for _ in range(2):
        engine.step()
    engine.begin()
    engine.cancel("goes")
    events = run_all(engine)
    assert [event.finish for event in events["goes"]] == [FinishReason.CANCELLED]
    assert events["stays"][-1].finish is FinishReason.LENGTH
    assert engine.stats().services["a"].failed_steps == 1


def test_an_executor_that_runs_on_after_a_failure_ends_the_engine():
    failures = iter([True])
    engine = failing_engine(
        lambda plan, prompts: next(failures, False), "fake", "fake", kind=RunsOn, scheduler={"depth": 2}
    )
    engine.submit(make_request("one", max_tokens=1))
    engine.submit(make_request("other", service="b"))
    with pytest.raises(RuntimeError, match="ran plan 1 behind 0, which failed"):
        engine.step()
    with pytest.raises(EngineDied, match="ran plan 1 behind 0"):
        engine.submit(make_request("again"))


def test_a_failed_step_ends_a_profile():
    engine = failing_engine(poisoned, wrap=RowsRecorder)
    engine.submit(make_request(prompt=[POISON]))
    with pytest.raises(RuntimeError, match="failed while it was measured: MemoryError"):
        engine.step()
