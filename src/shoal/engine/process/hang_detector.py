"""How long an engine's steps take, for those who must tell a long step from one that hangs.

On a CPU a step is judged by the CPU time that the process uses, as ``StallTracker`` has it. A GPU computes while
its process waits, or spins, so that there only time counts.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shoal.core import StepPlan
from shoal.engine.process.stall_tracker import BUSY_LOOP_FACTOR, StallTracker

# How many steps of a size the mean goes back.
_WINDOW = 64


class PresentStep(NamedTuple):
    """What is computed now."""

    plan: int
    """Number of its plan."""
    service: str
    """Whose it is."""
    usual_s: float | None
    """What steps of the service and of its size cost, by ``StepTimer``'s clock; None: this is the first."""


class StepTimer:
    """Times plans from one end to the next, by service and size: powers of two of the tokens they compute.

    clock: nanoseconds of what steps cost. The engine's thread tells of plans; any thread reads ``present``.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.present: PresentStep | None = None
        """The oldest plan in flight, if there is one."""
        self._clock = clock
        self._in_flight: deque[tuple[int, tuple[str, int]]] = deque()  # number, and service and size
        self._started_ns = 0
        self._means: dict[tuple[str, int], tuple[float, int]] = {}  # seconds, and of how many steps

    def begin(self, plan: StepPlan) -> None:
        """A plan is about to be computed, after those in flight."""
        tokens = sum(plan.new_tokens) + (plan.iterations - 1) * len(plan.seq_ids)
        self._in_flight.append((plan.number, (plan.service, tokens.bit_length())))
        if len(self._in_flight) == 1:
            self._look()

    def end(self) -> None:
        """The oldest plan is over."""
        _, kind = self._in_flight.popleft()
        taken_s = (self._clock() - self._started_ns) / 1e9
        mean_s, count = self._means.get(kind, (0.0, 0))
        count = min(count + 1, _WINDOW)
        self._means[kind] = mean_s + (taken_s - mean_s) / count, count
        self._look()

    def _look(self) -> None:
        """The clock runs for the plan that is the oldest now."""
        self._started_ns = self._clock()
        if not self._in_flight:
            self.present = None
            return
        number, kind = self._in_flight[0]
        mean_s, _ = self._means.get(kind, (None, 0))
        self.present = PresentStep(number, kind[0], mean_s)


class HangDetector:
    """Says whether the present step hangs, by the looks that somebody takes at it.

    limit_s: ``cluster.step_timeout``. threads: those that compute; None: a GPU does. most_s: each look counts
    as at most so much time, so that a machine or a process that slept makes no step look hung. A step is
    judged from the first look that saw it.
    """

    def __init__(self, limit_s: float, threads: int | None, most_s: float) -> None:
        self._limit_s = limit_s
        self._threads = threads
        self._most_s = most_s
        self._plan: int | None = None
        self._work = StallTracker()

    def look(self, present: PresentStep | None, since_s: float, cpu_s: float) -> str:
        """Why the present step hangs, in words; empty: it does not.

        since_s, cpu_s: since the last look, the CPU time without that of whoever looks.
        """
        if present is None or present.plan != self._plan:
            self._plan = None if present is None else present.plan
            self._work.progress()
            return ""
        self._work.look(min(since_s, self._most_s), cpu_s)
        return self._stands_still(present) or self._goes_in_circles(present)

    def _stands_still(self, present: PresentStep) -> str:
        work = self._work
        if self._threads is None or work.still_s <= self._limit_s:
            return ""
        return (
            f"a step of {present.service} stands still: it used {work.still_cpu_s:.3f} s of CPU time in"
            f" {work.still_s:.1f} s (the limit, cluster.step_timeout, is {self._limit_s:g} s)"
        )

    def _goes_in_circles(self, present: PresentStep) -> str:
        usual_s = present.usual_s
        first_s = BUSY_LOOP_FACTOR * self._limit_s
        most_s = first_s if usual_s is None else max(self._limit_s, BUSY_LOOP_FACTOR * usual_s)
        spent_s = self._work.took_s if self._threads is None else self._work.cpu_s / self._threads
        if spent_s <= most_s:
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
