"""Requests that run alone, because engines died while they computed them."""

from collections.abc import Sequence

from shoal.cluster.manager.state import Call, Engine

DEATHS_TOGETHER, DEATHS_ALONE = 2, 2
"""Deaths without progress between them after which a request runs alone, and is given up."""


class Quarantine:
    """Chooses engines that are kept free for suspected requests, one request at a time on each.

    patience_ns: how long a request waits for an engine that is being restarted, before a running one is kept
    free for it.
    """

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._calls: dict[str, Call] = {}

    @property
    def pending(self) -> list[Call]:
        """Requests that wait for their turn, longest first."""
        return [call for call in self._calls.values() if call.engine is None]

    def blame(self, call: Call, engine: Engine, now_ns: int) -> bool:
        """An engine died in a step of the request, which it has lost; False: the request is given up."""
        call.deaths += 1
        if engine.reserved is call:
            call.deaths_alone += 1
            return call.deaths_alone < DEATHS_ALONE
        if call.deaths >= DEATHS_TOGETHER and call.quarantined_ns is None:
            call.quarantined_ns = now_ns
            self._calls[call.told.request] = call
        return True

    def absolve(self, call: Call) -> None:
        """The request got a token, so it may run with others."""
        call.deaths = call.deaths_alone = 0
        self.forget(call)

    def forget(self, call: Call) -> None:
        """The request needs no engine of its own any more."""
        if call.quarantined_ns is not None:
            call.quarantined_ns = None
            del self._calls[call.told.request]

    def choose(self, call: Call, engines: Sequence[Engine], now_ns: int) -> Engine | None:
        """The engine that is to be kept free for a request that waits; None: none yet.

        engines: those that serve it. An idle one is best, and of those the one that became ready last. Where
        all are busy, it waits for one that is being restarted, and not for too long: then the one with the
        fewest requests is to finish them. As long as there are several, one stays open to all other requests.
        """
        free = [engine for engine in engines if engine.takes_requests and engine.reserved in (None, call)]
        shut = [engine for engine in engines if engine.takes_requests and engine.reserved not in (None, call)]
        if not free or (shut and len(free) < 2):
            return None
        idle = [engine for engine in free if engine.idle]
        if idle:
            return max(idle, key=lambda engine: engine.ready_ns)
        kept = next((engine for engine in free if engine.reserved is call), None)
        if kept is not None:
            return kept
        assert call.quarantined_ns is not None
        patient = now_ns - call.quarantined_ns < self._patience_ns
        if patient and any(engine.comes for engine in engines):
            return None
        return min(free, key=lambda engine: engine.load.unfinished)
