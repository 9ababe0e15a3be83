"""Requests that no engine has."""

from collections.abc import Mapping, Sequence

from shoal.cluster.state import Call


class WaitingCalls:
    """Those of each service in the order of submission, whenever they began to wait."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, Call]] = {}

    @property
    def services(self) -> Sequence[str]:
        """Services whose requests wait."""
        return [service for service, calls in self._calls.items() if calls]

    def of(self, service: str) -> Sequence[Call]:
        """Those of a service."""
        return _in_order(self._calls.get(service, {}))

    def add(self, call: Call) -> None:
        """One more waits; one that lost its engine waits before those that came after it."""
        self._calls.setdefault(call.told.service, {})[call.told.request] = call

    def take(self, service: str) -> Sequence[Call]:
        """Those of a service, which do not wait any more."""
        return _in_order(self._calls.pop(service, {}))

    def remove(self, call: Call) -> None:
        """One does not wait any more, if it did."""
        self._calls.get(call.told.service, {}).pop(call.told.request, None)


def _in_order(calls: Mapping[str, Call]) -> Sequence[Call]:
    return sorted(calls.values(), key=lambda call: call.number)
