"""Sources of requests: open loop (arrival times of a trace) and closed loop (clients that wait)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from shoal.core import Request
from shoal.measure import RequestRow


class Source(Protocol):
    """Yields requests in order of arrival."""

    @property
    def total(self) -> int:
        """Number of all requests; read when the last one has ended."""
        ...

    @property
    def next_ns(self) -> int | None:
        """Next arrival; None: none before some request ends."""
        ...

    def take(self) -> Request:
        """Take the next request."""
        ...

    def ended(self, row: RequestRow) -> None:
        """A request has ended or was refused."""
        ...


class OpenLoop:
    """Requests that arrive at fixed times."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = sorted(requests, key=lambda request: request.arrival_ns)
        self._next = 0
        self.total = len(requests)

    @property
    def next_ns(self) -> int | None:
        return self._requests[self._next].arrival_ns if self._next < self.total else None

    def take(self) -> Request:
        """Take the next request."""
        self._next += 1
        return self._requests[self._next - 1]

    def ended(self, row: RequestRow) -> None:
        pass


class ClosedLoop:
    """``clients`` users, each of whom sends the next request ``think_ns`` after a response.

    The first requests arrive at time 0; arrival times in ``requests`` are ignored.
    """

    def __init__(self, requests: Sequence[Request], clients: int, think_ns: int = 0) -> None:
        if clients < 1:
            raise ValueError(f"a closed loop needs at least 1 client, got {clients}")
        self._requests = deque(requests)
        self._think_ns = think_ns
        self._arrivals = deque([0] * min(clients, len(requests)))
        self.total = len(requests)

    @property
    def next_ns(self) -> int | None:
        return self._arrivals[0] if self._arrivals and self._requests else None

    def take(self) -> Request:
        """Take the next request, with its simulated arrival time."""
        return replace(self._requests.popleft(), arrival_ns=self._arrivals.popleft())

    def ended(self, row: RequestRow) -> None:
        self._arrivals.append(row.finish_ns + self._think_ns)
