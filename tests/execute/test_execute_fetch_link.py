"""Weights that come in virtual time: one after the other, while steps go on more slowly."""

import pytest

from shoal.core import Arrival, NewSequence, SamplingParams, StepPlan
from shoal.execute.fetch_link import FetchLink, FetchTimes
from shoal.execute.simulated import SimulatedExecutor, SimulatedModel
from shoal.forecast import FittedTimes, LatencyModel

pytestmark = pytest.mark.without_native

SECOND = 1_000_000_000
STEP = FittedTimes(LatencyModel(constant_s=1.0, sequence_s=0, token_s=0, context_s=0, work_s=0))
"""Every step takes a second."""


def executor(slowdown: float = 1.0, **seconds: float) -> tuple[SimulatedExecutor, list[int]]:
    now_ns = [0]
    models = {"a": SimulatedModel(times=STEP)}
    times = FetchTimes(seconds=seconds, slowdown=slowdown)
    return SimulatedExecutor(models, lambda: now_ns[0], lambda plan, start_ns, end_ns: None, times), now_ns


def plan(*, rows: int = 0, iterations: int = 1, joins: bool = False, fetch: tuple[str, ...] = ()) -> StepPlan:
    seq_ids = tuple(range(rows))
    new = [NewSequence(number, (1, 2), 2, 1, (number,), SamplingParams(), seed=0) for number in seq_ids]
    return StepPlan(
        number=0,
        service="a" if rows else "",
        seq_ids=seq_ids,
        new_tokens=(1,) * rows,
        sampled=seq_ids,
        iterations=iterations,
        joined=tuple(new) if joins else (),
        fetch=fetch,
    )


def test_weights_come_after_their_time() -> None:
    simulated, now_ns = executor(x=2.5)
    now_ns[0] = SECOND
    simulated.submit(plan(fetch=("x",)))
    assert simulated.ends_ns == SECOND, "a fetch does not lengthen its plan"
    assert simulated.collect().duration_ns == 0
    assert simulated.link.next_arrival_ns(SECOND) == 3_500_000_000
    now_ns[0] = 3_499_999_999
    assert not simulated.arrivals()
    now_ns[0] += 1
    assert list(simulated.arrivals()) == [Arrival("x", 2.5)]
    assert not simulated.arrivals()
    assert simulated.link.next_arrival_ns(0) is None


def test_several_fetches_come_one_after_the_other() -> None:
    simulated, now_ns = executor(x=1.0, y=2.0, z=0.5)
    simulated.submit(plan(fetch=("x", "y")))
    now_ns[0] = SECOND // 2
    simulated.submit(plan(fetch=("z",)))
    times = [simulated.link.next_arrival_ns(after) for after in (0, SECOND, 3 * SECOND)]
    assert times == [SECOND, 3 * SECOND, 3_500_000_000]
    now_ns[0] = 3 * SECOND
    assert [arrival.weights for arrival in simulated.arrivals()] == ["x", "y"]
    now_ns[0] = 4 * SECOND
    assert [arrival.weights for arrival in simulated.arrivals()] == ["z"]


def test_a_fetch_begins_when_the_plans_before_it_have_ended() -> None:
    simulated, _ = executor(x=2.0)
    simulated.submit(plan(rows=1, joins=True))
    simulated.submit(plan(rows=1, fetch=("x",)))
    assert simulated.plan_ends_ns == [SECOND, 2 * SECOND]
    assert simulated.link.next_arrival_ns(0) == 3 * SECOND


def test_steps_take_longer_while_weights_come() -> None:
    simulated, _ = executor(1.5, x=2.0)
    simulated.submit(plan(rows=1, joins=True, fetch=("x",), iterations=4))
    # The second step has half a second left at the slower speed, in which it makes a third of its work.
    second = 2 * SECOND + round(2 / 3 * SECOND)
    assert simulated.iteration_ends_ns == [1_500_000_000, second, second + SECOND, second + 2 * SECOND]


def test_single_steps_take_as_long_as_iterations_of_one_plan() -> None:
    durations_ns = [300_000_001, 1, 700_000_003, 500_000_000, 2]
    link = FetchLink(FetchTimes(seconds={"x": 1.7}, slowdown=1.3))
    link.fetch("x", 5)
    start_ns, ends_ns = 7, []
    for duration_ns in durations_ns:
        ends_ns += link.step_ends_ns(start_ns, [duration_ns])
        start_ns = ends_ns[-1]
    assert link.step_ends_ns(7, durations_ns) == ends_ns
    lost_ns = (1_700_000_005 - 7) * 0.3 / 1.3
    assert abs(ends_ns[-1] - 7 - sum(durations_ns) - lost_ns) <= len(durations_ns), "but for rounding"
