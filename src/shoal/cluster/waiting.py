"""Requests that no engine has."""

from collections.abc import Mapping, Sequence

from shoal.cluster.state import Call


class WaitingCalls:
    """Those of each service in the order of submission, whenever they began to wait."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, Call]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def services(self) -> Sequence[str]:
        """Services whose requests wait."""
        return list(self._calls)

    def has(self, service: str) -> bool:
        """Whether requests of a service wait."""
        return service in self._calls

    def of(self, service: str) -> Sequence[Call]:
        """Those of a service."""
        return _in_order(self._calls.get(service, {}))

    def add(self, call: Call) -> None:
        """One more waits; one that lost its engine waits before those that came after it."""
        self._calls.setdefault(call.told.service, {})[call.told.request] = call

    def remove(self, call: Call) -> None:
        """One does not wait any more, if it did."""
        calls = self._calls.get(call.told.service)
        if calls is not None:
            calls.pop(call.told.request, None)
            if not calls:
                del self._calls[call.told.service]


def _in_order(calls: Mapping[str, Call]) -> Sequence[Call]:
    return sorted(calls.values(), key=lambda call: call.number)
