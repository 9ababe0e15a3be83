"""The waiting requests of one service."""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import overload

from shoal.schedule.tracked import Tracked


class WaitingQueue(Sequence[Tracked]):
    """Requests without KV, by rank and then by submission; knows also who starves first.

    due_ns: when a request starves; does not change while it waits.

    A list in order: putting one in or taking one out moves memory, which for ten thousand requests takes
    a few microseconds.
    """

    def __init__(self, due_ns: Callable[[Tracked], int]) -> None:
        self._due_ns = due_ns
        # (rank, number, request); numbers differ, so that requests are never compared.
        self._ranked: list[tuple[float, int, Tracked]] = []
        # (due, number of the entry, request); those of an earlier stay in the queue have other numbers.
        self._by_due: list[tuple[int, int, Tracked]] = []
        self._entries = 0

    def add(self, one: Tracked) -> None:
        """Put in at the place that its rank gives it."""
        entry = (one.rank, one.number, one)
        self._ranked.insert(bisect_left(self._ranked, entry), entry)
        self._entries += 1
        one.entry = self._entries
        if len(self._by_due) > 2 * len(self._ranked) + 64:
            self._by_due = [entry for entry in self._by_due if entry[1] == entry[2].entry]
            heapq.heapify(self._by_due)
        heapq.heappush(self._by_due, (self._due_ns(one), one.entry, one))

    def remove(self, one: Tracked) -> None:
        """Take out; raises ValueError where it is not in the queue."""
        at = bisect_left(self._ranked, (one.rank, one.number))
        if at == len(self._ranked) or self._ranked[at][2] is not one:
            raise ValueError(f"request {one.request.id!r} does not wait")
        del self._ranked[at]
        one.entry = 0

    def first_due(self) -> Tracked | None:
        """Who starves first."""
        while self._by_due and self._by_due[0][1] != self._by_due[0][2].entry:
            heapq.heappop(self._by_due)
        return self._by_due[0][2] if self._by_due else None

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Tracked]:
        return map(itemgetter(2), self._ranked)

    @overload
    def __getitem__(self, index: int) -> Tracked: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tracked]: ...
    def __getitem__(self, index: int | slice) -> Tracked | list[Tracked]:
        if isinstance(index, slice):
            return [one for _, _, one in self._ranked[index]]
        return self._ranked[index][2]
