"""Timers of a simulation: callbacks at fixed times, other than steps and arrivals."""

import heapq
from collections.abc import Callable


class Timers:
    """Callbacks in order of time, then of rank, then of being set.

    Ranks make the order of simultaneous callbacks of different engines independent of the order of calls.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._set = 0

    @property
    def next_ns(self) -> int | None:
        """Time of the next callback; None: none."""
        return self._heap[0][0] if self._heap else None

    def set(self, time_ns: int, do: Callable[[], None], rank: int = -1) -> None:
        """Set a callback; rank: the number of its engine."""
        self._set += 1
        heapq.heappush(self._heap, (time_ns, rank, self._set, do))

    def run_due(self, now_ns: int) -> None:
        """Run all callbacks due by now, including those set meanwhile."""
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[3]()
