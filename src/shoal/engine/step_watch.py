"""How long an engine's steps take, for those who must tell a long step from one that hangs."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shoal.core import StepPlan

LEAST_LIMIT_S = 30.0
"""No step is too long before this."""

LIMIT_FACTOR = 20.0
"""Nor before so many times the mean of steps of its size."""

# How many steps of a size the mean goes back.
_WINDOW = 64


class PresentStep(NamedTuple):
    """What is computed now."""

    plan: int
    """Number of its plan."""
    limit_s: float
    """How long it may take."""


class StepWatch:
    """Times plans from one end to the next, by size: powers of two of the tokens that they compute.

    The engine's thread tells of plans; any thread reads ``present``.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.present: PresentStep | None = None
        """The oldest plan in flight, if there is one."""
        self._clock = clock
        self._in_flight: deque[tuple[int, int]] = deque()  # number and size
        self._started_ns = 0
        self._means: dict[int, tuple[float, int]] = {}  # seconds, and of how many steps, by size

    def begin(self, plan: StepPlan) -> None:
        """A plan is about to be computed, after those in flight."""
        tokens = sum(plan.new_tokens) + (plan.iterations - 1) * len(plan.seq_ids)
        self._in_flight.append((plan.number, tokens.bit_length()))
        if len(self._in_flight) == 1:
            self._look()

    def end(self) -> None:
        """The oldest plan is over."""
        _, size = self._in_flight.popleft()
        taken_s = (self._clock() - self._started_ns) / 1e9
        mean_s, count = self._means.get(size, (0.0, 0))
        count = min(count + 1, _WINDOW)
        self._means[size] = mean_s + (taken_s - mean_s) / count, count
        self._look()

    def _look(self) -> None:
        """The clock runs for the plan that is the oldest now."""
        self._started_ns = self._clock()
        if not self._in_flight:
            self.present = None
            return
        number, size = self._in_flight[0]
        mean_s, _ = self._means.get(size, (0.0, 0))
        self.present = PresentStep(number, max(LEAST_LIMIT_S, LIMIT_FACTOR * mean_s))


class Overdue:
    """How much longer the present step takes than it may, by the looks that somebody takes at it.

    Each look counts as at most ``most_s`` of time, so that a machine or a process that slept makes no step
    look hung. A step is timed from the first look that saw it.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._plan: int | None = None
        self._taken_s = 0.0

    def look(self, present: PresentStep | None, since_s: float) -> float:
        """Seconds over the limit, ``since_s`` after the last look; 0 where there are none."""
        if present is None or present.plan != self._plan:
            self._plan = None if present is None else present.plan
            self._taken_s = 0.0
            return 0.0
        self._taken_s += min(since_s, self._most_s)
        return max(0.0, self._taken_s - present.limit_s)
