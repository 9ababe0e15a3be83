"""The waiting requests of one service."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import overload

from shoal.schedule.request_state import RequestState


class WaitingQueue(Sequence[RequestState]):
    """Requests without KV, by rank, then by arrival, then by submission; knows also who starves first.

    due_ns: when a request starves. slo_expired_ns: from when on its goals are out of reach and it is put last
    (None for never); without it nobody is. Neither changes while a request waits.

    A list in order: putting one in or taking one out moves memory, which for ten thousand requests takes
    a few microseconds.
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
        self._by_due = _Timetable()
        self._by_slo_expiry = _Timetable()
        self._slo_expired_until_ns = 0
        """Until when those have been looked for whose goals are out of reach."""
        self._entries = 0
        self.num_scored = 0
        """How many of them want log-probabilities of prompt tokens."""

    def add(self, request: RequestState) -> None:
        """Put in at the place that its rank gives it, or last."""
        self._entries += 1
        self.num_scored += request.is_scored
        request.queue_entry = self._entries
        self._by_due.add(self._due_ns(request), request, len(self))
        slo_expired_ns = None if self._slo_expired_ns is None else self._slo_expired_ns(request)
        if slo_expired_ns is not None:
            self._by_slo_expiry.add(slo_expired_ns, request, len(self))
            if slo_expired_ns <= self._slo_expired_until_ns:
                request.rank = math.inf
        insort(self._ranked, (request.rank, request.arrival_ns, request.number, request))

    def remove(self, request: RequestState) -> None:
        """Take out; raises ValueError where it is not in the queue."""
        self._take_out(request)
        self.num_scored -= request.is_scored
        request.queue_entry = 0

    def _take_out(self, request: RequestState) -> None:
        at = bisect_left(self._ranked, (request.rank, request.arrival_ns, request.number))
        if at == len(self._ranked) or self._ranked[at][3] is not request:
            raise ValueError(f"request {request.request.id!r} does not wait")
        del self._ranked[at]

    def first_due(self) -> RequestState | None:
        """Who starves first."""
        first = self._by_due.first()
        return None if first is None else first[2]

    @property
    def next_slo_expired_ns(self) -> int | None:
        """When the goals of the next one get out of reach; None: of nobody who waits."""
        first = self._by_slo_expiry.first()
        return None if first is None else first[0]

    def demote_slo_expired(self, now_ns: int) -> list[RequestState]:
        """Put those last whose goals are out of reach by now; returns who has become so, each once a stay."""
        self._slo_expired_until_ns = now_ns
        found = []
        while (first := self._by_slo_expiry.first()) is not None and first[0] <= now_ns:
            self._by_slo_expiry.remove_first()
            request = first[2]
            found.append(request)
            if not request.deprioritized:
                self._take_out(request)
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


class _Timetable:
    """Something that happens once to every request of a queue, the earliest first.

    Requests that have left the queue, or come again, are forgotten when their turn comes.
    """

    def __init__(self) -> None:
        # (time, number of the stay, request); an earlier stay in the queue had another number.
        self._heap: list[tuple[int, int, RequestState]] = []

    def add(self, time_ns: int, request: RequestState, waiting: int) -> None:
        """Add one that is in the queue, beside as many as are ``waiting``."""
        if len(self._heap) > 2 * waiting + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].queue_entry]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (time_ns, request.queue_entry, request))

    def first(self) -> tuple[int, int, RequestState] | None:
        """The earliest: its time, the number of its stay, and who it is."""
        while self._heap and self._heap[0][1] != self._heap[0][2].queue_entry:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def remove_first(self) -> None:
        """The earliest has happened."""
        heapq.heappop(self._heap)
