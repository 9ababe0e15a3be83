"""The waiting requests of one service."""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from shoal.schedule.tracked import Tracked


class WaitingQueue(Sequence[Tracked]):
    """Requests without KV, by rank and then by submission; knows also who starves first.

    due_ns: when a request starves; does not change while it waits.

    A list in order: putting one in or taking one out moves memory, which for ten thousand requests takes
    microseconds.
    """

    def __init__(self, due_ns: Callable[[Tracked], int]) -> None:
        self._due_ns = due_ns
        self._keys: list[tuple[float, int]] = []
        self._requests: list[Tracked] = []
        # (due, number of the entry, request); those of an earlier stay in the queue have other numbers.
        self._by_due: list[tuple[int, int, Tracked]] = []
        self._entries = 0

    def add(self, one: Tracked) -> None:
        """Put in at the place that its rank gives it."""
        key = (one.rank, one.number)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, one)
        self._entries += 1
        one.entry = self._entries
        if len(self._by_due) > 2 * len(self._requests) + 64:
            self._by_due = [entry for entry in self._by_due if entry[1] == entry[2].entry]
            heapq.heapify(self._by_due)
        heapq.heappush(self._by_due, (self._due_ns(one), one.entry, one))

    def remove(self, one: Tracked) -> None:
        """Take out; raises ValueError where it is not in the queue."""
        at = bisect_left(self._keys, (one.rank, one.number))
        if at == len(self._requests) or self._requests[at] is not one:
            raise ValueError(f"request {one.request.id!r} does not wait")
        del self._keys[at]
        del self._requests[at]
        one.entry = 0

    def first_due(self) -> Tracked | None:
        """Who starves first."""
        while self._by_due and self._by_due[0][1] != self._by_due[0][2].entry:
            heapq.heappop(self._by_due)
        return self._by_due[0][2] if self._by_due else None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Tracked: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tracked]: ...
    def __getitem__(self, index: int | slice) -> Tracked | list[Tracked]:
        return self._requests[index]
