"""Waiting queue of one service, sorted by rank and arrival; next request to starve, next expiry of an SLO."""

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import overload

from shoal.schedule.request_state import RequestState


class WaitingQueue(Sequence[RequestState]):
    """Waiting requests, by rank, then by arrival, then by submission.

    due_ns: time at which a request starves. slo_expired_ns: time at which it is put last because its goals
    can no longer be met, or None. Neither changes while a request waits.

    A sorted list: insertion and removal move memory, which takes a few microseconds for ten thousand
    requests.
    """

    def __init__(
        self,
        due_ns: Callable[[RequestState], int],
        slo_expired_ns: Callable[[RequestState], int | None] | None = None,
    ) -> None:
        self._due_ns = due_ns
        self._slo_expired_ns = slo_expired_ns
        # (rank, arrival, number, request); numbers differ, so that requests are never compared.
        self._ranked: list[tuple[float, int, int, RequestState]] = []
        self._by_due = _DueHeap()
        self._by_slo_expiry = _DueHeap()
        self._slo_expired_until_ns = 0
        """Time of the last ``demote_slo_expired``."""
        self.entries = 0
        """How many requests have entered it."""
        self.batches: Counter[tuple[bool, int]] = Counter()
        """Number of requests by ``RequestState.batch_order``."""
        self.num_scored = 0
        """Number of requests that want log-probabilities of prompt tokens."""

    def add(self, request: RequestState) -> None:
        """Insert by rank, or last if its SLO has expired."""
        self.entries += 1
        self.num_scored += request.is_scored
        self.batches[request.batch_order] += 1
        request.queue_entry = self.entries
        self._by_due.add(self._due_ns(request), request, len(self))
        slo_expired_ns = None if self._slo_expired_ns is None else self._slo_expired_ns(request)
        if slo_expired_ns is not None:
            self._by_slo_expiry.add(slo_expired_ns, request, len(self))
            if slo_expired_ns <= self._slo_expired_until_ns:
                request.rank = math.inf
        insort(self._ranked, (request.rank, request.arrival_ns, request.number, request))

    def remove(self, request: RequestState) -> None:
        """Raises ValueError if the request is not in the queue."""
        self._remove_ranked(request)
        self.num_scored -= request.is_scored
        self.batches[request.batch_order] -= 1
        if not self.batches[request.batch_order]:
            del self.batches[request.batch_order]
        request.queue_entry = 0

    def _remove_ranked(self, request: RequestState) -> None:
        at = bisect_left(self._ranked, (request.rank, request.arrival_ns, request.number))
        if at == len(self._ranked) or self._ranked[at][3] is not request:
            raise ValueError(f"request {request.request.id!r} is not waiting")
        del self._ranked[at]

    def first_to_starve(self) -> RequestState | None:
        """The request that starves first."""
        first = self._by_due.first()
        return None if first is None else first[2]

    @property
    def next_slo_expired_ns(self) -> int | None:
        """Time at which the next SLO of a waiting request expires; None: never."""
        first = self._by_slo_expiry.first()
        return None if first is None else first[0]

    def demote_slo_expired(self, now_ns: int) -> list[RequestState]:
        """Put requests with expired SLO last; returns those that have expired since the last call."""
        self._slo_expired_until_ns = now_ns
        found = []
        while (first := self._by_slo_expiry.first()) is not None and first[0] <= now_ns:
            self._by_slo_expiry.remove_first()
            request = first[2]
            found.append(request)
            if not request.deprioritized:
                self._remove_ranked(request)
                request.rank = math.inf
                insort(self._ranked, (request.rank, request.arrival_ns, request.number, request))
        return found

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


class _DueHeap:
    """Heap of the requests of a queue by a time.

    Entries of requests that have left the queue, or entered it again, are removed when they come first.
    """

    def __init__(self) -> None:
        # (time, queue_entry, request); after leaving the queue a request has another queue_entry.
        self._heap: list[tuple[int, int, RequestState]] = []

    def add(self, time_ns: int, request: RequestState, waiting: int) -> None:
        """Add a request of the queue, in which ``waiting`` requests are."""
        if len(self._heap) > 2 * waiting + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].queue_entry]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (time_ns, request.queue_entry, request))

    def first(self) -> tuple[int, int, RequestState] | None:
        """The earliest valid entry: time, queue entry, request."""
        while self._heap and self._heap[0][1] != self._heap[0][2].queue_entry:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def remove_first(self) -> None:
        """Remove the entry that ``first`` returns."""
        heapq.heappop(self._heap)
