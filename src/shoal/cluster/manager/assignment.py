"""Which engine has which request."""

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from shoal.cluster.manager.actions import Dispatch, Withdraw
from shoal.cluster.manager.dispatch import DispatchPolicy
from shoal.cluster.manager.engine_load import EngineLoad, Newcomer
from shoal.cluster.manager.quarantine import Quarantine
from shoal.cluster.manager.state import Call, Engine, Residence
from shoal.cluster.manager.waiting_queue import WaitingCalls
from shoal.cluster.status import EngineState

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


class _OpenEngines(NamedTuple):
    """The engines that take requests of a service."""

    loads: Sequence[EngineLoad]
    least_tokens: float
    """Tokens that fill the memory of the smallest of them."""


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
        # By service; emptied whenever an engine begins or ceases to take requests.
        self._open: dict[str, _OpenEngines] = {}
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
        heads = [call.number_and_service for name in waiting.services if (call := self._next(name))]
        heapify(heads)
        dispatched = []
        while heads:
            number, service = heappop(heads)
            call = self._next(service, number)
            assert call is not None
            dispatch = self.dispatch(call, now_ns)
            if dispatch is None:
                continue
            waiting.remove(call)
            dispatched.append(dispatch)
            following = self._next(service, number)
            if following is not None:
                heappush(heads, following.number_and_service)
        return dispatched

    def _next(self, service: str, number: int = 0) -> Call | None:
        """Whose turn it is of those that wait, from a number on: the first for whom an engine is open."""
        if not self._opened(service).loads:
            return None
        waiting = self.waiting.of(service, number)
        return next((call for call in waiting if self.open_engines(call)), None)

    def _seat(self, call: Call, now_ns: int) -> list[Dispatch]:
        """Keep an engine free for a quarantined request, and dispatch it once that has nothing else."""
        service = call.told.service
        engines = [
            engine
            for engine in self._engines.values()
            if service in engine.residences and (engine.serves(service) or engine.comes)
        ]
        chosen = self._quarantine.choose(call, self.able(call, engines), now_ns)
        for engine in engines:
            if engine.reserved is call and engine is not chosen:
                engine.reserved = None
        if chosen is None:
            return []
        chosen.reserved = call
        return [self._give(call, self._newcomer(call, now_ns), chosen)] if chosen.idle else []

    def open_engines(self, call: Call) -> Sequence[EngineLoad]:
        """Loads of the engines to which a request may go now."""
        opened = self._opened(call.told.service)
        if call.told.longest <= opened.least_tokens:
            return opened.loads
        return [
            engine.load for engine in self.able(call, [self._engines[load.name] for load in opened.loads])
        ]

    def able(self, call: Call, engines: Sequence[Engine]) -> Sequence[Engine]:
        """Those of some engines of its service that have room for a request, as long as it may become.

        Where no engine that is wanted has, the largest of them, which say why it cannot be served.
        """
        roomy = [engine for engine in engines if engine.has_room(call.told)]
        if roomy or self._may_come(call):
            return roomy
        sizes = [engine.load.kv_tokens[call.told.service] for engine in engines]
        return [engine for engine, size in zip(engines, sizes, strict=True) if size == max(sizes)]

    def _may_come(self, call: Call) -> bool:
        """Whether any engine of its service that stays has room for a request, or may have it once loaded."""
        service = call.told.service
        return any(
            engine.residences.get(service, Residence.FAILED) is not Residence.FAILED
            and engine.state is not EngineState.DRAINING
            and engine.has_room(call.told)
            for engine in self._engines.values()
        )

    def _opened(self, service: str) -> _OpenEngines:
        opened = self._open.get(service)
        if opened is None:
            engines = [
                engine
                for engine in self._engines.values()
                if engine.serves(service) and engine.takes_requests and engine.reserved is None
            ]
            sizes = [engine.load.kv_tokens.get(service, math.inf) for engine in engines]
            least = min(sizes, default=math.inf)
            opened = self._open[service] = _OpenEngines([engine.load for engine in engines], least)
        return opened

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

    def submit(self, call: Call, now_ns: int) -> Dispatch | None:
        """Give a new request to an engine; None: it waits, as others of its service that could go to one."""
        dispatch = None
        if not self.waiting.count(call.told.service) or self._next(call.told.service) is None:
            dispatch = self.dispatch(call, now_ns)
        if dispatch is None:
            self.wait(call, now_ns)
        return dispatch

    def dispatch(self, call: Call, now_ns: int) -> Dispatch | None:
        """Give a request to an engine; None: no engine is open to it, or has room."""
        engines = self.open_engines(call)
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
            first = self._next(service)
            if first is None or first.number >= call.number:
                continue
            if now_ns - first.waiting_since_ns >= PATIENCE_NS:
                held.update(load.name for load in self.open_engines(first))
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
