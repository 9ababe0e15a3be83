"""Which engine has which request."""

from collections.abc import Mapping, Sequence

from shoal.cluster.actions import Dispatch, Withdraw
from shoal.cluster.dispatch import DispatchPolicy
from shoal.cluster.engine_load import EngineLoad, Newcomer
from shoal.cluster.quarantine import Quarantine
from shoal.cluster.state import Call, Engine
from shoal.cluster.waiting import WaitingCalls


class Assignment:
    """Chooses engines for requests, and keeps what engines have and how loaded they are up to date.

    engines: those that are wanted, by name; whoever owns them calls ``settle`` when one begins or ceases to
    take requests. quarantine: of requests that run alone.
    """

    def __init__(self, policy: DispatchPolicy, engines: Mapping[str, Engine], quarantine: Quarantine) -> None:
        self._policy = policy
        self._engines = engines
        self._quarantine = quarantine
        self._chosen: dict[str, int] = {}
        # Loads of the engines that take requests, by service; emptied whenever one changes.
        self._open: dict[str, list[EngineLoad]] = {}
        self.waiting = WaitingCalls()
        """Requests without an engine; quarantined ones are not here."""

    def settle(self, now_ns: int) -> list[Dispatch]:
        """After a change of who takes requests: dispatch what waits, quarantined requests first."""
        self._open.clear()
        for engine in self._engines.values():
            held = engine.reserved
            if held is None or held.engine is engine:
                continue
            if held.quarantined_ns is None or not engine.takes_requests:
                engine.reserved = None
        dispatched = [each for call in self._quarantine.pending for each in self._seat(call, now_ns)]
        for service in self.waiting.services:
            engines = self.open_engines(service)
            if engines:
                dispatched += [self.dispatch(call, engines, now_ns) for call in self.waiting.take(service)]
        return dispatched

    def _seat(self, call: Call, now_ns: int) -> list[Dispatch]:
        """Keep an engine free for a quarantined request, and dispatch it once that has nothing else."""
        service = call.told.service
        engines = [
            engine
            for engine in self._engines.values()
            if service in engine.residences and (engine.serves(service) or engine.comes)
        ]
        chosen = self._quarantine.choose(call, engines, now_ns)
        for engine in engines:
            if engine.reserved is call and engine is not chosen:
                engine.reserved = None
        if chosen is None:
            return []
        chosen.reserved = call
        return [self.dispatch(call, [chosen.load], now_ns)] if chosen.idle else []

    def open_engines(self, service: str) -> list[EngineLoad]:
        """Loads of the engines to which requests of a service may go."""
        engines = self._open.get(service)
        if engines is None:
            engines = self._open[service] = [
                engine.load
                for engine in self._engines.values()
                if engine.serves(service) and engine.takes_requests and engine.reserved is None
            ]
        return engines

    def reserve(self, call: Call, engines: Sequence[EngineLoad], now_ns: int) -> Engine:
        """Choose one of some engines, which has the request in its load from now on."""
        service = call.told.service
        turn = self._chosen.get(service, 0)
        self._chosen[service] = turn + 1
        newcomer = Newcomer(call.told, call.tokens, turn, now_ns)
        load = engines[0] if len(engines) == 1 else self._policy.choose(newcomer, engines)
        load.add(newcomer)
        return self._engines[load.name]

    def unreserve(self, call: Call, engine: Engine) -> None:
        """The request does not come to an engine that has it in its load."""
        engine.load.remove(call.told.request)

    def hand_over(self, call: Call, engine: Engine) -> None:
        """An engine that has the request in its load has it from now on, in the next attempt."""
        self.release(call)
        call.engine = engine
        call.attempt += 1
        engine.calls[call.told.request] = call

    def dispatch(self, call: Call, engines: Sequence[EngineLoad], now_ns: int) -> Dispatch:
        """Give a request to one of some engines."""
        engine = self.reserve(call, engines, now_ns)
        self.hand_over(call, engine)
        return Dispatch(call.told.request, engine.name, engine.incarnation, call.attempt)

    def release(self, call: Call) -> None:
        """The request's engine does not have it any more."""
        if call.engine is not None:
            del call.engine.calls[call.told.request]
            call.engine.load.remove(call.told.request)
            call.engine = None

    def withdraw(self, call: Call, now_ns: int) -> Withdraw:
        """Take a request from its engine, which lives; it waits."""
        self.release(call)
        self.wait(call, now_ns)
        return Withdraw(call.told.request)

    def wait(self, call: Call, now_ns: int) -> None:
        """The request has no engine and waits for one, in the order of submission."""
        call.waiting_since_ns = now_ns
        if call.quarantined_ns is None:
            self.waiting.add(call)
