"""Step times as they were in a run: varied by chance, or at the pace that the machine had at each moment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.forecast import StepRows, StepTimes
from shoal.forecast.latency import FloatArray

WINDOW_S = 10.0
"""The pace of a moment is that of all steps within so many seconds around it."""


@dataclass(frozen=True)
class Jittered:
    """Step times that vary by chance around others. share: standard deviation, of the time."""

    times: StepTimes
    share: float
    chance: np.random.Generator

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step, each time others."""
        return self.times.step_time(rows) * self._factor()

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of a run of decode steps."""
        return self.times.decode_times(sequences, context, steps) * [self._factor() for _ in range(steps)]

    def _factor(self) -> float:
        return max(0.5, 1 + self.share * self.chance.standard_normal())


class Pace:
    """How long the steps of a run took around each moment, in multiples of what a model says of them."""

    def __init__(
        self, times: StepTimes, steps: Sequence[tuple[StepRows, float]], started_s: Sequence[float]
    ) -> None:
        self._started_s = np.asarray(started_s)
        self._took_s = np.cumsum([0.0, *(seconds for _, seconds in steps)])
        self._said_s = np.cumsum([0.0, *(times.step_time(rows) for rows, _ in steps)])

    def at(self, now_s: float) -> float:
        """The pace around ``now_s``; of the whole run where no step was near."""
        near = (now_s - WINDOW_S / 2, now_s + WINDOW_S / 2)
        first, last = (int(at) for at in self._started_s.searchsorted(near))
        if first == last:
            first, last = 0, len(self._started_s)
        took, said = (float(sums[last] - sums[first]) for sums in (self._took_s, self._said_s))
        return took / said


@dataclass
class Paced:
    """Other step times at the pace of a run. clock: nanoseconds of virtual time, set by who simulates."""

    times: StepTimes
    pace: Pace
    clock: Callable[[], int] = lambda: 0

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step that begins now."""
        return self.times.step_time(rows) * self.pace.at(self.clock() / 1e9)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Never asked: nothing may be skipped, since each step has a moment of its own."""
        raise NotImplementedError("steps have a moment of their own: simulate with Watch(skip_ahead=False)")
