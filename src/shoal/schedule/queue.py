"""The waiting requests of one service."""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import overload

from shoal.schedule.tracked import Tracked


class WaitingQueue(Sequence[Tracked]):
    """Requests without KV, by rank and then by submission; knows also who has gone without a step longest.

    A list in order: putting one in or taking one out moves memory, which for ten thousand requests takes
    microseconds.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._requests: list[Tracked] = []
        # (since, number of the entry, request), with entries of requests that have left or come again.
        self._by_wait: list[tuple[int, int, Tracked]] = []
        self._entries = 0

    def add(self, one: Tracked) -> None:
        """Put in at the place that its rank gives it."""
        key = (one.rank, one.number)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, one)
        one.waits = True
        if len(self._by_wait) > 2 * len(self._requests) + 64:
            self._by_wait = [entry for entry in self._by_wait if entry[2].waits]
            heapq.heapify(self._by_wait)
        self._entries += 1
        heapq.heappush(self._by_wait, (one.served_ns, self._entries, one))

    def remove(self, one: Tracked) -> None:
        """Take out; raises ValueError where it is not in the queue."""
        at = bisect_left(self._keys, (one.rank, one.number))
        if at == len(self._requests) or self._requests[at] is not one:
            raise ValueError(f"request {one.request.id!r} does not wait")
        del self._keys[at]
        del self._requests[at]
        one.waits = False

    def longest_unserved(self) -> Tracked | None:
        """Who went longest without taking part in a step."""
        while self._by_wait and not self._by_wait[0][2].waits:
            heapq.heappop(self._by_wait)
        return self._by_wait[0][2] if self._by_wait else None

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
