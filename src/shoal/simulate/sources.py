"""Where requests come from: a trace, or clients that wait for their answers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from shoal.core import Request


class Source(Protocol):
    """Hands out requests in the order of their arrival."""

    @property
    def total(self) -> int:
        """How many requests there are in all."""
        ...

    @property
    def next_ns(self) -> int | None:
        """When the next one arrives as far as is known now; None: not before some request has ended."""
        ...

    def take(self) -> Request:
        """The next one."""
        ...

    def ended(self, request_id: str, now_ns: int) -> None:
        """A request that was taken has ended, or was refused."""
        ...


class OpenLoop:
    """Requests that arrive when they arrive, whatever becomes of those before."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = sorted(requests, key=lambda request: request.arrival_ns)
        self._at = 0
        self.total = len(requests)

    @property
    def next_ns(self) -> int | None:
        """The next arrival."""
        return self._requests[self._at].arrival_ns if self._at < self.total else None

    def take(self) -> Request:
        """The next one."""
        self._at += 1
        return self._requests[self._at - 1]

    def ended(self, request_id: str, now_ns: int) -> None:
        """Nothing follows from it."""


class ClosedLoop:
    """``clients`` users, each of whom sends the next request ``think_ns`` after an answer.

    Their first requests arrive at time 0; arrival times in ``requests`` mean nothing.
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
        """When the client who was answered first of those who think now asks again."""
        return self._arrivals[0] if self._arrivals and self._requests else None

    def take(self) -> Request:
        """The next request, with its time of arrival."""
        return replace(self._requests.popleft(), arrival_ns=self._arrivals.popleft())

    def ended(self, request_id: str, now_ns: int) -> None:
        """Its client thinks, then sends another."""
        self._arrivals.append(now_ns + self._think_ns)
