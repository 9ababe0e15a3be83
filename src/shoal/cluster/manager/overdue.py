"""Requests that have waited for an engine for too long."""

from collections.abc import Iterator, Sequence

from shoal.cluster.manager.assignment import Assignment
from shoal.cluster.manager.state import Engine, ManagedCall


class Overdue:
    """Finds requests that waited for ``wait_s`` while no engine with room for them was ready.

    Requests also wait while engines are ready, for a batch or for a packer's room: that does not count.
    """

    def __init__(self, wait_s: float, assignment: Assignment) -> None:
        self._wait_s = wait_s
        self._assignment = assignment
        self._unready_ns: dict[str, int] = {}
        """By service: since when no engine was ready for it, as of the last tick."""
        self._ticked_ns = 0

    def ticked(self, now_ns: int) -> None:
        self._ticked_ns = now_ns

    def find(
        self, service: str, calls: Sequence[ManagedCall], engines: Sequence[Engine], now_ns: int
    ) -> Iterator[tuple[ManagedCall, str]]:
        """The overdue ones of a service's waiting requests, and why; engines: on which it is placed."""
        if not calls:
            return
        ready = [engine for engine in engines if engine.accepts_requests and engine.serves(service)]
        if ready:
            self._unready_ns.pop(service, None)
        unready_ns = 0 if ready else self._unready_ns.setdefault(service, self._ticked_ns)
        for call in calls:
            waited_ns = now_ns - max(call.waiting_since_ns, unready_ns)
            if waited_ns < self._wait_s * 1e9 or self._assignment.with_room(call, ready):
                continue
            large = f" with KV memory for {call.submitted.longest} tokens" if ready else ""
            yield call, f"no engine of service {service!r}{large} was ready for {self._wait_s:g} s"
