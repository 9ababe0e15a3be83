"""Detects hung steps: times an engine's steps by size, and compares the present one with its limit.

On a CPU a step is judged by the CPU time that the process uses (``StallTracker``). A GPU computes while its
process waits or spins, so there only wall time counts.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shoal.core import StepPlan
from shoal.engine.process.stall_tracker import BUSY_LOOP_FACTOR, StallTracker

# A mean is over about this many steps of a size.
_WINDOW = 64


class PresentStep(NamedTuple):
    """The oldest plan in flight."""

    plan: int
    """The plan's number."""
    service: str
    usual_s: float | None
    """Mean time of steps of this service and size, on the clock of ``StepTimer``; None: this is the first."""


class StepTimer:
    """Mean step times by service and size, where a size is a power of two of computed tokens.

    clock: nanoseconds, of wall or CPU time. The engine's thread calls it; any thread may read ``present``.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.present: PresentStep | None = None
        self._clock = clock
        self._in_flight: deque[tuple[int, tuple[str, int]]] = deque()  # number, and service and size
        self._started_ns = 0
        self._means: dict[tuple[str, int], tuple[float, int]] = {}  # seconds, and of how many steps

    def begin(self, plan: StepPlan) -> None:
        """Called before a plan is submitted to the executor."""
        tokens = sum(plan.new_tokens) + (plan.iterations - 1) * len(plan.seq_ids)
        self._in_flight.append((plan.number, (plan.service, tokens.bit_length())))
        if len(self._in_flight) == 1:
            self._restart()

    def end(self) -> None:
        """Called when the oldest plan is finished."""
        _, kind = self._in_flight.popleft()
        taken_s = (self._clock() - self._started_ns) / 1e9
        mean_s, count = self._means.get(kind, (0.0, 0))
        count = min(count + 1, _WINDOW)
        self._means[kind] = mean_s + (taken_s - mean_s) / count, count
        self._restart()

    def _restart(self) -> None:
        """Restart the clock, for the plan that is the oldest now."""
        self._started_ns = self._clock()
        if not self._in_flight:
            self.present = None
            return
        number, kind = self._in_flight[0]
        mean_s, _ = self._means.get(kind, (None, 0))
        self.present = PresentStep(number, kind[0], mean_s)


class HangDetector:
    """Judges whether the present step hangs, from periodic observations.

    limit_s: ``cluster.step_timeout``. threads: CPU threads that compute; None: a GPU computes. max_s: maximum
    time that an observation counts for, so that no step looks hung after the machine or process slept. A step
    is judged from its first observation on.
    """

    def __init__(self, limit_s: float, threads: int | None, max_s: float) -> None:
        self._limit_s = limit_s
        self._threads = threads
        self._max_s = max_s
        self._plan: int | None = None
        self._work = StallTracker()

    def observe(self, present: PresentStep | None, since_s: float, cpu_s: float) -> str:
        """Why the present step hangs; empty: it does not.

        since_s, cpu_s: wall and CPU time since the last call; the CPU time without that of the caller.
        """
        if present is None or present.plan != self._plan:
            self._plan = None if present is None else present.plan
            self._work.progress()
            return ""
        self._work.observe(min(since_s, self._max_s), cpu_s)
        return self._stalls(present) or self._exceeds_limit(present)

    def _stalls(self, present: PresentStep) -> str:
        work = self._work
        if self._threads is None or work.still_s <= self._limit_s:
            return ""
        return (
            f"a step of {present.service} stands still: it used {work.still_cpu_s:.3f} s of CPU time in"
            f" {work.still_s:.1f} s (the limit, cluster.step_timeout, is {self._limit_s:g} s)"
        )

    def _exceeds_limit(self, present: PresentStep) -> str:
        usual_s = present.usual_s
        first_s = BUSY_LOOP_FACTOR * self._limit_s
        max_s = first_s if usual_s is None else max(self._limit_s, BUSY_LOOP_FACTOR * usual_s)
        spent_s = self._work.took_s if self._threads is None else self._work.cpu_s / self._threads
        if spent_s <= max_s:
            return ""
        unit = "" if self._threads is None else f" of CPU time on each of {self._threads} threads"
        usual = (
            f"it is the first of its size, which may take {BUSY_LOOP_FACTOR:g} times cluster.step_timeout"
            f" ({self._limit_s:g} s)"
            if usual_s is None
            else f"steps of its size take {usual_s:.3g} s, and this may take {BUSY_LOOP_FACTOR:g} times that"
            f" or cluster.step_timeout ({self._limit_s:g} s)"
        )
        return f"a step of {present.service} does not end: it took {spent_s:.1f} s{unit}; {usual}"
