"""What happens at known times of a simulation, beside steps and arrivals."""

import heapq
from collections.abc import Callable


class Timers:
    """Things to do later, in the order of their times.

    At one time those of lower rank come first, and those of one rank in the order in which they were set: so
    things of different engines do not depend on which of them was asked first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Callable[[], None]]] = []
        self._set = 0

    @property
    def next_ns(self) -> int | None:
        """When there is something to do next; None: never."""
        return self._heap[0][0] if self._heap else None

    def set(self, time_ns: int, do: Callable[[], None], rank: int = -1) -> None:
        """Do something at a time; rank: the number of the engine that it comes from."""
        self._set += 1
        heapq.heappush(self._heap, (time_ns, rank, self._set, do))

    def run_due(self, now_ns: int) -> None:
        """Do what is due by now, and what that sets for now."""
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[3]()
