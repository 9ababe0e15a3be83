"""The waiting requests of one service."""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import overload

from shoal.schedule.request_state import RequestState


class WaitingQueue(Sequence[RequestState]):
    """Requests without KV, by rank, then by arrival, then by submission; knows also who starves first.

    due_ns: when a request starves; does not change while it waits.

    A list in order: putting one in or taking one out moves memory, which for ten thousand requests takes
    a few microseconds.
    """

    def __init__(self, due_ns: Callable[[RequestState], int]) -> None:
        self._due_ns = due_ns
        # (rank, arrival, number, request); numbers differ, so that requests are never compared.
        self._ranked: list[tuple[float, int, int, RequestState]] = []
        # (due, number of the stay, request); an earlier stay in the queue had another number.
        self._by_due: list[tuple[int, int, RequestState]] = []
        self._entries = 0

    def add(self, request: RequestState) -> None:
        """Put in at the place that its rank gives it."""
        entry = (request.rank, request.arrival_ns, request.number, request)
        self._ranked.insert(bisect_left(self._ranked, entry), entry)
        self._entries += 1
        request.queue_entry = self._entries
        if len(self._by_due) > 2 * len(self._ranked) + 64:
            self._by_due = [entry for entry in self._by_due if entry[1] == entry[2].queue_entry]
            heapq.heapify(self._by_due)
        heapq.heappush(self._by_due, (self._due_ns(request), request.queue_entry, request))

    def remove(self, request: RequestState) -> None:
        """Take out; raises ValueError where it is not in the queue."""
        at = bisect_left(self._ranked, (request.rank, request.arrival_ns, request.number))
        if at == len(self._ranked) or self._ranked[at][3] is not request:
            raise ValueError(f"request {request.request.id!r} does not wait")
        del self._ranked[at]
        request.queue_entry = 0

    def first_due(self) -> RequestState | None:
        """Who starves first."""
        while self._by_due and self._by_due[0][1] != self._by_due[0][2].queue_entry:
            heapq.heappop(self._by_due)
        return self._by_due[0][2] if self._by_due else None

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[RequestState]:
        return map(itemgetter(3), self._ranked)

    @overload
    def __getitem__(self, index: int) -> RequestState: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestState]: ...
    def __getitem__(self, index: int | slice) -> RequestState | list[RequestState]:
        if isinstance(index, slice):
            return [entry[3] for entry in self._ranked[index]]
        return self._ranked[index][3]
