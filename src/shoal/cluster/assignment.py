"""Which engine has which request."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from shoal.cluster.actions import Dispatch, Withdraw
from shoal.cluster.dispatch import DispatchPolicy
from shoal.cluster.engine_load import EngineLoad, Newcomer
from shoal.cluster.quarantine import Quarantine
from shoal.cluster.state import Call, Engine
from shoal.cluster.waiting import WaitingCalls

PATIENCE_NS = 10_000_000_000
"""Who has waited so long for room is passed by nobody who might take it."""


class Chooser(Protocol):
    """Chooses among engines."""

    def engines_changed(self) -> None:
        """Other engines take requests, or of other services."""

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """Where a request goes that no engine has; engines: all that may get it. None: it waits."""
        ...

    def choose_target(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """Where a request goes that leaves its engine; engines: where it can go. None: nowhere now."""
        ...


class ByPolicy:
    """What a dispatch policy chooses, which always chooses one."""

    def __init__(self, policy: DispatchPolicy) -> None:
        self._policy = policy

    def engines_changed(self) -> None:
        """Policies remember nothing."""

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad:
        """The policy's choice."""
        return engines[0] if len(engines) == 1 else self._policy.choose(newcomer, engines)

    choose_target = choose


class Assignment:
    """Chooses engines for requests, and keeps what engines have and how loaded they are up to date.

    engines: those that are wanted, by name; whoever owns them calls ``settle`` when one begins or ceases to
    take requests. quarantine: of requests that run alone.
    """

    def __init__(self, chooser: Chooser, engines: Mapping[str, Engine], quarantine: Quarantine) -> None:
        self._chooser = chooser
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
        self._chooser.engines_changed()
        for engine in self._engines.values():
            held = engine.reserved
            if held is None or held.engine is engine:
                continue
            if held.quarantined_ns is None or not engine.takes_requests:
                engine.reserved = None
        dispatched = [each for call in self._quarantine.pending for each in self._seat(call, now_ns)]
        return dispatched + self.dispatch_waiting(now_ns)

    def dispatch_waiting(self, now_ns: int) -> list[Dispatch]:
        """Dispatch what waits, in the order of submission; who finds no room holds up its own service."""
        waiting = self.waiting
        heads = [call.number_and_service for name in waiting.services if (call := waiting.first(name))]
        heapify(heads)
        dispatched = []
        while heads:
            _, service = heappop(heads)
            call = waiting.first(service)
            assert call is not None
            dispatch = self.dispatch(call, now_ns)
            if dispatch is None:
                continue
            waiting.remove(call)
            dispatched.append(dispatch)
            following = waiting.first(service)
            if following is not None:
                heappush(heads, following.number_and_service)
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
        return [self._give(call, self._newcomer(call, now_ns), chosen)] if chosen.idle else []

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

    def choose_target(self, call: Call, engines: Sequence[EngineLoad], now_ns: int) -> Engine | None:
        """One of some engines for a request that leaves its own; None: nowhere now."""
        load = self._chooser.choose_target(self._newcomer(call, now_ns), engines)
        return None if load is None else self._engines[load.name]

    def reserve(self, call: Call, engine: Engine, now_ns: int) -> None:
        """An engine has the request in its load from now on."""
        self._add(self._newcomer(call, now_ns), engine.load)

    def _add(self, newcomer: Newcomer, load: EngineLoad) -> None:
        self._chosen[newcomer.call.service] = newcomer.turn + 1
        load.add(newcomer)

    def _newcomer(self, call: Call, now_ns: int) -> Newcomer:
        return Newcomer(call.told, call.tokens, self._chosen.get(call.told.service, 0), now_ns)

    def unreserve(self, call: Call, engine: Engine) -> None:
        """The request does not come to an engine that has it in its load."""
        engine.load.remove(call.told.request)

    def hand_over(self, call: Call, engine: Engine) -> None:
        """An engine that has the request in its load has it from now on, in the next attempt."""
        self.release(call)
        call.engine = engine
        call.attempt += 1
        engine.calls[call.told.request] = call

    def dispatch(self, call: Call, now_ns: int) -> Dispatch | None:
        """Give a request to an engine; None: no engine is open to it, or has room."""
        engines = self.open_engines(call.told.service)
        held = self._held_from(call, now_ns) if self.waiting else ()
        if held:
            engines = [load for load in engines if load.name not in held]
        if not engines:
            return None
        newcomer = self._newcomer(call, now_ns)
        load = self._chooser.choose(newcomer, engines)
        return None if load is None else self._give(call, newcomer, self._engines[load.name])

    def _held_from(self, call: Call, now_ns: int) -> set[str]:
        """Engines that are left to earlier requests, which have waited for room there for long."""
        held: set[str] = set()
        for service in self.waiting.services:
            first = self.waiting.first(service)
            assert first is not None
            if first.number < call.number and now_ns - first.waiting_since_ns >= PATIENCE_NS:
                held.update(load.name for load in self.open_engines(service))
        return held

    def _give(self, call: Call, newcomer: Newcomer, engine: Engine) -> Dispatch:
        self._add(newcomer, engine.load)
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
