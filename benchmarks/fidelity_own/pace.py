"""Step times for simulation: with random jitter, or scaled by a run's own pace over time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.forecast import StepRows, StepTimes
from shoal.forecast.latency import FloatArray

WINDOW_S = 10.0
"""The pace at a time is that of all steps in a window of this length around it."""


@dataclass(frozen=True)
class Jittered:
    """Step times with random jitter. share: relative standard deviation."""

    times: StepTimes
    share: float
    rng: np.random.Generator

    def step_time(self, rows: StepRows) -> float:
        return self.times.step_time(rows) * self._factor()

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        return self.times.decode_times(sequences, context, steps) * [self._factor() for _ in range(steps)]

    def _factor(self) -> float:
        return max(0.5, 1 + self.share * self.rng.standard_normal())


class Pace:
    """Step times of a run over time, relative to a model's."""

    def __init__(
        self, times: StepTimes, steps: Sequence[tuple[StepRows, float]], started_s: Sequence[float]
    ) -> None:
        self._started_s = np.asarray(started_s)
        self._run_s = np.cumsum([0.0, *(seconds for _, seconds in steps)])
        self._model_s = np.cumsum([0.0, *(times.step_time(rows) for rows, _ in steps)])

    def at(self, now_s: float) -> float:
        """The pace around ``now_s``; of the whole run without steps nearby."""
        near = (now_s - WINDOW_S / 2, now_s + WINDOW_S / 2)
        first, last = (int(at) for at in self._started_s.searchsorted(near))
        if first == last:
            first, last = 0, len(self._started_s)
        ran, modelled = (float(sums[last] - sums[first]) for sums in (self._run_s, self._model_s))
        return ran / modelled


@dataclass
class Paced:
    """Step times at the pace of a run. clock: virtual time in nanoseconds, set by ``simulate``."""

    times: StepTimes
    pace: Pace
    clock: Callable[[], int] = lambda: 0

    def step_time(self, rows: StepRows) -> float:
        return self.times.step_time(rows) * self.pace.at(self.clock() / 1e9)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Not supported: skipped steps have no time of their own."""
        raise NotImplementedError("the pace depends on the time: simulate with Watch(skip_ahead=False)")
