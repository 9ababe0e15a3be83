"""Quarantine of requests suspected of crashing engines: such a request runs alone until it makes progress."""

from collections.abc import Sequence

from shoal.cluster.manager.state import Engine, ManagedCall

DEATHS_TOGETHER, DEATHS_ALONE = 2, 2
"""Deaths without progress in between after which a request is quarantined; and, run alone, refused."""


class Quarantine:
    """Reserves engines for suspected requests, one request at a time on each.

    patience_ns: how long a request waits for a restarting engine before a busy one is reserved for it.
    """

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._calls: dict[str, ManagedCall] = {}

    @property
    def pending(self) -> list[ManagedCall]:
        """Quarantined requests without an engine, in order of quarantine."""
        return [call for call in self._calls.values() if call.engine is None]

    def record_death(self, call: ManagedCall, engine: Engine, now_ns: int) -> bool:
        """Count the death of an engine in a step of the request; False: the request is to be refused."""
        call.deaths += 1
        if engine.reserved is call:
            call.deaths_alone += 1
            return call.deaths_alone < DEATHS_ALONE
        if call.deaths >= DEATHS_TOGETHER and call.quarantined_ns is None:
            call.quarantined_ns = now_ns
            self._calls[call.id] = call
        return True

    def clear(self, call: ManagedCall) -> None:
        """The request made progress, so it may run with other requests."""
        call.deaths = call.deaths_alone = 0
        self.forget(call)

    def forget(self, call: ManagedCall) -> None:
        """End the quarantine of a request."""
        if call.quarantined_ns is not None:
            call.quarantined_ns = None
            del self._calls[call.id]

    def choose(self, call: ManagedCall, engines: Sequence[Engine], now_ns: int) -> Engine | None:
        """The engine to reserve for a waiting request; None: none yet.

        engines: those that serve it. Idle engines come first, the one that became ready last. If all are
        busy, the request waits for a restarting one up to the patience; then the engine with the fewest
        requests is reserved. Of several engines, one stays open to all other requests.
        """
        free = [engine for engine in engines if engine.accepts_requests and engine.reserved in (None, call)]
        taken = [
            engine for engine in engines if engine.accepts_requests and engine.reserved not in (None, call)
        ]
        if not free or (taken and len(free) < 2):
            return None
        idle = [engine for engine in free if engine.idle]
        if idle:
            return max(idle, key=lambda engine: engine.ready_ns)
        kept = next((engine for engine in free if engine.reserved is call), None)
        if kept is not None:
            return kept
        assert call.quarantined_ns is not None
        patient = now_ns - call.quarantined_ns < self._patience_ns
        if patient and any(engine.will_accept_requests for engine in engines):
            return None
        return min(free, key=lambda engine: engine.load.unfinished)
