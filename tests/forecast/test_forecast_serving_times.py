"""Step times from what a running engine knows: a sample of its steps, or its speed alone."""

import numpy as np
import pytest

from shoal.forecast import FittedTimes, LatencyModel, StepRows, serving_times, times_from_speed

TRUTH = FittedTimes(LatencyModel(constant_s=4e-3, sequence_s=2e-4, token_s=3e-4, context_s=1e-6, work_s=2e-8))
OTHERWISE = times_from_speed(1e-3, 9e-3)


def steps_of_a_server(count: int, seed: int = 0) -> tuple[list[StepRows], list[float]]:
    """A third with a prompt; durations of the truth, a few percent longer, and some much longer."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        decodes = int(random.integers(0 if number % 3 == 0 else 1, 24))
        chunks = ((int(random.integers(2, 400)), 0),) if number % 3 == 0 else ()
        attended = int(random.integers(20, 600)) * decodes
        rows.append(StepRows(decodes, attended, chunks, decodes + len(chunks)))
    slower = 1 + random.exponential(0.02, count) + 2.0 * (random.random(count) < 0.03)
    return rows, [TRUTH.step_time(step) * factor for step, factor in zip(rows, slower, strict=True)]


@pytest.mark.parametrize("count", [60, 400])
def test_the_times_of_steps_as_they_ran_are_found(count):
    rows, seconds = steps_of_a_server(count)
    times = serving_times(rows, seconds, OTHERWISE)
    asked = [StepRows(1, 100, (), 1), StepRows(16, 3200, (), 16), StepRows(0, 0, ((256, 0),), 1)]
    for step in asked:
        assert times.step_time(step) == pytest.approx(TRUTH.step_time(step), rel=0.12)


def test_without_steps_of_both_kinds_the_speed_counts():
    rows, seconds = steps_of_a_server(400)
    decodes = [at for at, step in enumerate(rows) if not step.chunks]
    assert serving_times([], [], OTHERWISE) is OTHERWISE
    assert serving_times(rows[:30], seconds[:30], OTHERWISE) is OTHERWISE
    only = serving_times([rows[at] for at in decodes], [seconds[at] for at in decodes], OTHERWISE)
    assert only is OTHERWISE


def test_noise_alone_is_not_believed():
    rows, _ = steps_of_a_server(100)
    assert serving_times(rows, [1e-3] * len(rows), OTHERWISE) is OTHERWISE


def test_a_request_alone_takes_its_speed():
    times = times_from_speed(1e-3, 9e-3)
    assert times.step_time(StepRows(1, 50, (), 1)) == pytest.approx(9e-3)
    assert times.step_time(StepRows(0, 0, ((80, 0),), 1)) == pytest.approx(80e-3 + 8e-3)
    # A device whose prompts take as long as its outputs.
    assert times_from_speed(2e-3, 1e-3).step_time(StepRows(1, 50, (), 1)) == pytest.approx(2e-3)
