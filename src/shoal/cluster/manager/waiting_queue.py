"""The queue of requests that wait for an engine, by service in order of submission."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from shoal.cluster.manager.state import ManagedCall


class WaitingCalls:
    """Waiting requests of each service in order of submission, whenever they began to wait."""

    def __init__(self) -> None:
        self._calls: dict[str, list[ManagedCall]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def services(self) -> Sequence[str]:
        """Services with waiting requests."""
        return list(self._calls)

    def count(self, service: str) -> int:
        return len(self._calls.get(service, ()))

    def of(self, service: str, number: int = 0) -> Iterator[ManagedCall]:
        """Requests of a service from a number on; the queue must not change during the iteration."""
        calls = self._calls.get(service, [])
        return islice(calls, bisect_left(calls, number, key=_number), None)

    def all(self) -> Iterator[ManagedCall]:
        """All requests; the queue must not change during the iteration."""
        return chain.from_iterable(self._calls.values())

    def add(self, call: ManagedCall) -> None:
        """Add a request; one that lost its engine keeps its place."""
        insort(self._calls.setdefault(call.service, []), call, key=_number)

    def remove(self, call: ManagedCall) -> None:
        """Remove a request, if it waits."""
        calls = self._calls.get(call.service, [])
        at = bisect_left(calls, call.number, key=_number)
        if at < len(calls) and calls[at] is call:
            del calls[at]
            if not calls:
                del self._calls[call.service]


def _number(call: ManagedCall) -> int:
    return call.number
