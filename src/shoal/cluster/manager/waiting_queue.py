"""Requests that no engine has."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from shoal.cluster.manager.state import Call


class WaitingCalls:
    """Those of each service in the order of submission, whenever they began to wait."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Call]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def services(self) -> Sequence[str]:
        """Services whose requests wait."""
        return list(self._calls)

    def count(self, service: str) -> int:
        """How many of a service wait."""
        return len(self._calls.get(service, ()))

    def of(self, service: str, number: int = 0) -> Iterator[Call]:
        """Those of a service, from a number on; none may come or go meanwhile."""
        calls = self._calls.get(service, [])
        return islice(calls, bisect_left(calls, number, key=_number), None)

    def add(self, call: Call) -> None:
        """One more waits; one that lost its engine waits before those that came after it."""
        insort(self._calls.setdefault(call.told.service, []), call, key=_number)

    def remove(self, call: Call) -> None:
        """One does not wait any more, if it did."""
        calls = self._calls.get(call.told.service, [])
        at = bisect_left(calls, call.number, key=_number)
        if at < len(calls) and calls[at] is call:
            del calls[at]
            if not calls:
                del self._calls[call.told.service]


def _number(call: Call) -> int:
    return call.number
