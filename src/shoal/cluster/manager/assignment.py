"""Assignment of requests to engines: dispatch of new and waiting requests, withdrawal, reassignment."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import msgspec

from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.manager.actions import Dispatch, Withdraw
from shoal.cluster.manager.batch_formation import BatchFormation, Formed
from shoal.cluster.manager.dispatch import DispatchPolicy
from shoal.cluster.manager.engine_load import BatchShape, EngineLoad, UnassignedRequest
from shoal.cluster.manager.quarantine import Quarantine
from shoal.cluster.manager.state import Engine, ManagedCall, Residence
from shoal.cluster.manager.waiting_queue import WaitingCalls
from shoal.cluster.status import EngineState

MAX_BYPASS_NS = 10_000_000_000
"""After this wait for room, later requests may not take the engines of a waiting request."""


class EngineChooser(Protocol):
    def engines_changed(self) -> None:
        """The set of open engines, or their services, changed."""

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad | None:
        """The engine for a request without one; engines: all candidates. None: it waits."""
        ...

    def choose_target(
        self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]
    ) -> EngineLoad | None:
        """The destination of a migration; engines: all candidates. None: none has room now."""
        ...


class PolicyChooser:
    """The choice of a dispatch policy, which always finds an engine."""

    def __init__(self, policy: DispatchPolicy) -> None:
        self._policy = policy

    def engines_changed(self) -> None:
        """Policies have no state."""

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        return engines[0] if len(engines) == 1 else self._policy.choose(unassigned, engines)

    choose_target = choose


class _OpenEngines(NamedTuple):
    """The engines that accept requests of a service."""

    loads: Sequence[EngineLoad]
    least_tokens: float
    """Tokens that fill the KV memory of the smallest of them."""


class Assignment:
    """Chooses engines for requests, and maintains each engine's requests and load.

    engines: all, by name; their owner calls ``settle`` when one begins or ceases to accept requests.
    batching: None: requests are dispatched one by one. standby_returns: whether engines on standby are
    activated when a request needs them.
    """

    def __init__(
        self,
        chooser: EngineChooser,
        engines: Mapping[str, Engine],
        quarantine: Quarantine,
        batching: BatchingOptions | None = None,
        *,
        standby_returns: bool = False,
    ) -> None:
        self._chooser = chooser
        self._engines = engines
        self._quarantine = quarantine
        self._standby_returns = standby_returns
        self._chosen: dict[str, int] = {}
        # By service; emptied whenever an engine begins or ceases to take requests.
        self._open: dict[str, _OpenEngines] = {}
        self.waiting = WaitingCalls()
        """Requests without an engine, except quarantined ones."""
        self.batches_formed: Counter[str] = Counter()
        """Dispatched batches by service."""
        self.batched_calls: Counter[str] = Counter()
        """Calls in them; one that was in several counts in each."""
        self.batches = None if batching is None else BatchFormation(batching, self.open_engines)

    def settle(self, now_ns: int) -> list[Dispatch]:
        """After a change of open engines: dispatch waiting requests, quarantined ones first."""
        self._open.clear()
        self._chooser.engines_changed()
        for engine in self._engines.values():
            held = engine.reserved
            if held is None or held.engine is engine:
                continue
            if held.quarantined_ns is None or not engine.accepts_requests:
                engine.reserved = None
        dispatched = [
            each for call in self._quarantine.pending for each in self._dispatch_quarantined(call, now_ns)
        ]
        return dispatched + self.dispatch_waiting(now_ns)

    def dispatch_waiting(self, now_ns: int) -> list[Dispatch]:
        """Dispatch waiting requests in order of submission; one without room blocks its own service.

        With batching, the batches that are due are dispatched instead.
        """
        waiting = self.waiting
        if self.batches is not None:
            return [
                dispatch
                for service in waiting.services
                for dispatch in self._dispatch_batches(self.batches, service, now_ns)
            ]
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

    def _dispatch_batches(self, batches: BatchFormation, service: str, now_ns: int) -> list[Dispatch]:
        """Dispatch the batches of a service that are due."""
        loads = self._opened(service).loads
        if not loads:
            return []
        dispatched = []
        for formed in batches.form(service, self.waiting.of(service), loads, now_ns):
            engine = self._engine_for(formed, now_ns)
            number = batches.next_number()
            limit = formed.shape.iterations if batches.options.limits_iterations else None
            for call in formed.calls:
                call.batch, call.shape = number, formed.shape
                unassigned = self._unassigned(call, now_ns, formed.shape)
                dispatched.append(self._assign(call, unassigned, engine, slice_tokens=limit))
                self.waiting.remove(call)
        return dispatched

    def _engine_for(self, formed: Formed, now_ns: int) -> Engine:
        """The dispatch policy's choice for a batch, as if it were one request of many choices."""
        first = formed.calls[0]
        rows, tokens = formed.shape.rows, [call.submitted.prompt_tokens for call in formed.calls]
        whole = msgspec.structs.replace(first.submitted, prompt_tokens=sum(tokens), choices=rows)
        expected = round(sum(call.tokens for call in formed.calls) / len(formed.calls))
        turn = self.batches_formed[first.service]
        self.batches_formed[first.service] += 1
        self.batched_calls[first.service] += len(formed.calls)
        unassigned = UnassignedRequest(whole, expected, turn, now_ns, formed.shape)
        load = self._chooser.choose(unassigned, formed.engines)
        assert load is not None, "a dispatch policy always finds an engine"
        return self._engines[load.name]

    def _next(self, service: str, number: int = 0) -> ManagedCall | None:
        """The next waiting request of a service, from a number on, to which an engine is open."""
        if not self._opened(service).loads:
            return None
        waiting = self.waiting.of(service, number)
        return next((call for call in waiting if self.open_engines(call)), None)

    def _dispatch_quarantined(self, call: ManagedCall, now_ns: int) -> list[Dispatch]:
        """Reserve an engine for a quarantined request, and dispatch it once that engine is idle."""
        service = call.service
        engines = [
            engine
            for engine in self._engines.values()
            if engine.places(service) and (engine.serves(service) or engine.will_accept_requests)
        ]
        chosen = self._quarantine.choose(call, self.with_room(call, engines), now_ns)
        for engine in engines:
            if engine.reserved is call and engine is not chosen:
                engine.reserved = None
        if chosen is None:
            return []
        chosen.reserved = call
        if self.batches is not None:
            call.batch = self.batches.next_number()
        return [self._assign(call, self._unassigned(call, now_ns), chosen)] if chosen.idle else []

    def open_engines(self, call: ManagedCall) -> Sequence[EngineLoad]:
        """Loads of the engines that a request may be dispatched to now."""
        opened = self._opened(call.service)
        if call.submitted.longest <= opened.least_tokens and not call.unloadable_on:
            return opened.loads
        return [
            engine.load
            for engine in self.with_room(call, [self._engines[load.name] for load in opened.loads])
        ]

    def with_room(self, call: ManagedCall, engines: Sequence[Engine]) -> Sequence[Engine]:
        """Those of some engines whose memory holds a request at its largest length.

        If no engine of the cluster has the room, the largest of these: its error says why. Engines that could
        not load the request's weights are left out.
        """
        engines = [engine for engine in engines if engine.name not in call.unloadable_on]
        roomy = [engine for engine in engines if engine.has_room(call.submitted)]
        if roomy or self._room_expected(call):
            return roomy
        sizes = [engine.load.kv_tokens[call.service] for engine in engines]
        return [engine for engine, size in zip(engines, sizes, strict=True) if size == max(sizes)]

    def _room_expected(self, call: ManagedCall) -> bool:
        """Whether any engine of the service that is to run has, or may have, room for a request."""
        service = call.service
        return any(
            engine.places(service)
            and engine.residences[service] is not Residence.FAILED
            and (engine.active or (self._standby_returns and engine.state is EngineState.STANDBY))
            and engine.name not in call.unloadable_on
            and engine.has_room(call.submitted)
            for engine in self._engines.values()
        )

    def _opened(self, service: str) -> _OpenEngines:
        opened = self._open.get(service)
        if opened is None:
            engines = [
                engine
                for engine in self._engines.values()
                if engine.serves(service) and engine.accepts_requests and engine.reserved is None
            ]
            sizes = [engine.load.kv_tokens.get(service, math.inf) for engine in engines]
            least = min(sizes, default=math.inf)
            opened = self._open[service] = _OpenEngines([engine.load for engine in engines], least)
        return opened

    def choose_target(self, call: ManagedCall, engines: Sequence[EngineLoad], now_ns: int) -> Engine | None:
        """The destination of a migration among some engines; None: none has room now."""
        load = self._chooser.choose_target(self._unassigned(call, now_ns), engines)
        return None if load is None else self._engines[load.name]

    def reserve(self, call: ManagedCall, engine: Engine, now_ns: int) -> None:
        """Count a request in the load of an engine."""
        self._add(self._unassigned(call, now_ns, call.shape), engine.load)

    def _add(self, unassigned: UnassignedRequest, load: EngineLoad) -> None:
        self._chosen[unassigned.call.service] = unassigned.turn + 1
        load.add(unassigned)

    def _unassigned(
        self, call: ManagedCall, now_ns: int, batch: BatchShape | None = None
    ) -> UnassignedRequest:
        turn = self._chosen.get(call.service, 0)
        return UnassignedRequest(call.submitted, call.tokens, turn, now_ns, batch)

    def unreserve(self, call: ManagedCall, engine: Engine) -> None:
        """Undo ``reserve``."""
        engine.load.remove(call.id)

    def reassign(self, call: ManagedCall, engine: Engine) -> None:
        """Give the request to an engine that has it in its load; begins the next attempt."""
        self.release(call)
        call.engine = engine
        call.attempt += 1
        engine.calls[call.id] = call

    def submit(self, call: ManagedCall, now_ns: int) -> Sequence[Dispatch]:
        """Dispatch a new request, unless it waits, as do earlier ones of its service."""
        if self.batches is not None:
            self.enqueue(call, now_ns)
            return self._dispatch_batches(self.batches, call.service, now_ns)
        dispatch = None
        if not self.waiting.count(call.service) or self._next(call.service) is None:
            dispatch = self.dispatch(call, now_ns)
        if dispatch is None:
            self.enqueue(call, now_ns)
            return ()
        return (dispatch,)

    def dispatch(self, call: ManagedCall, now_ns: int) -> Dispatch | None:
        """Dispatch a request; None: no engine is open to it, or has room."""
        engines = self.open_engines(call)
        held = self._engines_kept_for_earlier(call, now_ns) if self.waiting else ()
        if held:
            engines = [load for load in engines if load.name not in held]
        if not engines:
            return None
        unassigned = self._unassigned(call, now_ns)
        load = self._chooser.choose(unassigned, engines)
        return None if load is None else self._assign(call, unassigned, self._engines[load.name])

    def _engines_kept_for_earlier(self, call: ManagedCall, now_ns: int) -> set[str]:
        """Engines kept for earlier requests that have waited longer than ``MAX_BYPASS_NS``."""
        held: set[str] = set()
        for service in self.waiting.services:
            first = self._next(service)
            if first is None or first.number >= call.number:
                continue
            if now_ns - first.waiting_since_ns >= MAX_BYPASS_NS:
                held.update(load.name for load in self.open_engines(first))
        return held

    def _assign(
        self,
        call: ManagedCall,
        unassigned: UnassignedRequest,
        engine: Engine,
        *,
        slice_tokens: int | None = None,
    ) -> Dispatch:
        self._add(unassigned, engine.load)
        self.reassign(call, engine)
        return Dispatch(call.id, engine.name, engine.incarnation, call.attempt, call.batch, slice_tokens)

    def release(self, call: ManagedCall) -> None:
        """Take the request from its engine, if it has one."""
        if call.engine is not None:
            del call.engine.calls[call.id]
            call.engine.load.remove(call.id)
            call.engine = None

    def withdraw(self, call: ManagedCall, now_ns: int) -> Withdraw:
        """Take a request from its running engine; it waits."""
        self.release(call)
        self.enqueue(call, now_ns)
        return Withdraw(call.id)

    def enqueue(self, call: ManagedCall, now_ns: int) -> None:
        """Let a request wait for an engine."""
        call.waiting_since_ns = now_ns
        if call.quarantined_ns is None:
            self.waiting.add(call)
