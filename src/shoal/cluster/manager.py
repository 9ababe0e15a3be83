"""The manager of a cluster: which engine runs, and which has which request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.cluster.actions import (
    ClusterAction,
    Dispatch,
    KillEngine,
    RefusalKind,
    Refuse,
    Withdraw,
)
from shoal.cluster.dispatch import DispatchPolicy
from shoal.cluster.engine_load import EngineLoad, Newcomer
from shoal.cluster.events import (
    ClusterEvent,
    Ended,
    EngineAdded,
    EngineBeat,
    EngineDraining,
    EngineEnded,
    EngineFound,
    EngineReady,
    EngineRemoved,
    Progressed,
    ServiceFailed,
    ServiceLoaded,
    ServicePlaced,
    ServiceRemoved,
    ServiceUnloaded,
    ServiceWanted,
    Submitted,
    Ticked,
)
from shoal.cluster.lengths import ExpectedLengths
from shoal.cluster.options import ClusterOptions
from shoal.cluster.quarantine import Quarantine
from shoal.cluster.residency import Residency
from shoal.cluster.state import Call, Engine, ManagedEngine, Residence
from shoal.cluster.status import EngineState, ServiceStatus
from shoal.cluster.supervise import Supervisor
from shoal.cluster.waiting import WaitingCalls


class Manager:
    """Decides over engines and requests: a pure function of the events so far.

    It has no clock, and nothing in it is random: the same events give the same actions. What is told of
    engines may come late, twice or in another order, and of engines and incarnations that are not known any
    more: that changes nothing. What is told of requests comes from whoever accepts them, in order; unknown
    requests are ignored, and so is one that is submitted again before it ended.
    """

    def __init__(self, options: ClusterOptions, dispatch: DispatchPolicy) -> None:
        self._policy = dispatch
        self._wait_ns = round(options.wait_for_engine_s * 1e9)
        self._wait_s = options.wait_for_engine_s
        self._residency = Residency()
        self._supervisor = Supervisor(options, self._residency.starts_with)
        self._quarantine = Quarantine(self._wait_ns)
        self._lengths = ExpectedLengths()
        self._engines: dict[str, Engine] = {}
        # The last incarnation of every engine that ever was, so that none comes twice.
        self._incarnations: dict[str, int] = {}
        self._calls: dict[str, Call] = {}
        self._submitted = 0
        self._dispatched: dict[str, int] = {}
        # Requests without an engine; quarantined ones are not here.
        self._waiting = WaitingCalls()
        # Loads of the engines that take requests, by service; emptied whenever one changes.
        self._open: dict[str, list[EngineLoad]] = {}
        self._actions: list[ClusterAction] = []
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            EngineAdded: self._added,
            EngineFound: self._found,
            EngineReady: self._ready,
            EngineBeat: self._beat,
            EngineEnded: self._engine_ended,
            EngineDraining: self._draining,
            EngineRemoved: self._removed,
            ServicePlaced: self._placed,
            ServiceWanted: self._wanted,
            ServiceRemoved: self._service_removed,
            ServiceLoaded: self._loaded,
            ServiceFailed: self._failed,
            ServiceUnloaded: self._unloaded,
            Submitted: self._submit,
            Progressed: self._progressed,
            Ended: self._ended,
            Ticked: self._ticked,
        }

    @property
    def engines(self) -> Sequence[ManagedEngine]:
        """The engines that are wanted, in the order in which they were added."""
        return [engine.view() for engine in self._engines.values()]

    @property
    def services(self) -> Mapping[str, ServiceStatus]:
        """The services that engines are to serve, or that requests wait for."""
        names = dict.fromkeys([*self._residency.names, *self._waiting.services])
        return {name: self.service(name) for name in names}

    def service(self, name: str) -> ServiceStatus:
        """One service; zeros where nobody has heard of it."""
        engines = self._with(name)
        state, error = self._residency.state(name, engines)
        return ServiceStatus(
            ready=sum(engine.takes_requests and engine.serves(name) for engine in engines),
            wanted=sum(engine.state is not EngineState.DRAINING for engine in engines),
            waiting=self.waiting(name),
            state=state,
            error=error,
        )

    def waiting(self, service: str) -> int:
        """Requests of a service that no engine has."""
        alone = sum(call.told.service == service for call in self._quarantine.pending)
        return len(self._waiting.of(service)) + alone

    def owner(self, request: str) -> str | None:
        """The name of the engine that has a request; None: none has, or it is not known."""
        call = self._calls.get(request)
        return None if call is None or call.engine is None else call.engine.name

    def handle(self, event: ClusterEvent, now_ns: int) -> list[ClusterAction]:
        """What is to be done after an event, in this order. now_ns: when it was told, never decreasing."""
        self._actions = []
        self._handlers[type(event)](event, now_ns)
        return self._actions

    # Engines

    def _added(self, event: EngineAdded, now_ns: int) -> None:
        if event.engine not in self._engines:
            engine = self._add(event.engine, event.services, self._incarnations.get(event.engine, 0), now_ns)
            self._actions.append(self._supervisor.start(engine, engine.incarnation + 1))

    def _found(self, event: EngineFound, now_ns: int) -> None:
        known = self._incarnations.get(event.engine, 0) >= event.incarnation
        if event.engine not in self._engines and not known:
            engine = self._add(event.engine, event.services, event.incarnation, now_ns)
            self._supervisor.watch(engine)

    def _add(self, name: str, services: tuple[str, ...], incarnation: int, now_ns: int) -> Engine:
        load = EngineLoad(name, indexes_prefixes=self._policy.reads_prefixes)
        engine = Engine(load, EngineState.LOADING, incarnation, runs=True)
        self._engines[name] = engine
        for service in services:
            self._residency.add(service, engine, now_ns)
        return engine

    def _running(
        self, event: EngineReady | EngineBeat | EngineEnded | ServiceLoaded | ServiceFailed | ServiceUnloaded
    ) -> Engine | None:
        """The engine that an event tells of, if it is the one that runs now."""
        engine = self._engines.get(event.engine)
        present = engine is not None and engine.runs and engine.incarnation == event.incarnation
        return engine if present else None

    def _ready(self, event: EngineReady, now_ns: int) -> None:
        engine = self._running(event)
        if engine is None or engine.state is not EngineState.LOADING:
            return
        self._supervisor.heard(engine)
        engine.move(EngineState.READY)
        engine.ready_ns = now_ns
        engine.load.begin(event.speeds)
        self._actions += self._residency.ready(engine, event.speeds, now_ns)
        self._settle(now_ns)

    def _beat(self, event: EngineBeat, now_ns: int) -> None:
        engine = self._running(event)
        if engine is not None:
            self._note_kills(self._supervisor.heard(engine, event.overdue_s), now_ns)

    def _engine_ended(self, event: EngineEnded, now_ns: int) -> None:
        engine = self._running(event)
        if engine is None:
            return
        self._supervisor.ended(engine, event.reason, now_ns)
        suspects = set(event.suspects)
        for request, call in engine.calls.items():
            self._release(call)
            if request not in suspects or self._quarantine.blame(call, engine, now_ns):
                self._wait(call, now_ns)
            else:
                self._refuse(call, RefusalKind.POISON, _POISON, now_ns)
        engine.calls.clear()
        engine.reserved = None
        self._residency.stopped(engine)
        self._settle(now_ns)

    def _draining(self, event: EngineDraining, now_ns: int) -> None:
        engine = self._engines.get(event.engine)
        if engine is not None and engine.state is not EngineState.DRAINING:
            engine.move(EngineState.DRAINING)
            self._settle(now_ns)

    def _removed(self, event: EngineRemoved, now_ns: int) -> None:
        engine = self._engines.pop(event.engine, None)
        if engine is None:
            return
        self._incarnations[engine.name] = engine.incarnation
        for call in list(engine.calls.values()):
            self._withdraw(call, now_ns)
        if engine.runs and not engine.killed:
            self._actions.append(KillEngine(engine.name, engine.incarnation, "it was removed"))
        self._settle(now_ns)

    def _ticked(self, event: Ticked, now_ns: int) -> None:
        actions = self._supervisor.tick(self._engines.values(), now_ns)
        self._note_kills(actions, now_ns)
        self._actions += self._residency.ticked(self._engines.values(), now_ns)
        self._residency.forget_removed(self._engines.values())
        for service in self._waiting.services:
            self._give_up(service, self._waiting.of(service), now_ns)
        for call in self._quarantine.pending:
            self._give_up(call.told.service, [call], now_ns)
        if self._quarantine.pending:
            self._settle(now_ns)

    def _note_kills(self, actions: Sequence[ClusterAction], now_ns: int) -> None:
        self._actions += actions
        if any(isinstance(action, KillEngine) for action in actions):
            self._settle(now_ns)

    # Services

    def _placed(self, event: ServicePlaced, now_ns: int) -> None:
        engines = [self._engines[name] for name in event.engines if name in self._engines]
        self._actions += self._residency.place(event.service, engines, event.idle_after_s, now_ns)

    def _wanted(self, event: ServiceWanted, now_ns: int) -> None:
        self._actions += self._residency.want(event.service, event.loaded, self._with(event.service))

    def _service_removed(self, event: ServiceRemoved, now_ns: int) -> None:
        self._actions += self._residency.remove(event.service, self._with(event.service))
        self._settle(now_ns)

    def _loaded(self, event: ServiceLoaded, now_ns: int) -> None:
        engine = self._running(event)
        if engine is not None:
            engine.load.learn(event.service, event.speed)
            self._actions += self._residency.moved(event.service, engine, Residence.LOADED, now_ns)
            self._settle(now_ns)

    def _failed(self, event: ServiceFailed, now_ns: int) -> None:
        engine = self._running(event)
        if engine is None:
            return
        service = event.service
        self._actions += self._residency.moved(service, engine, Residence.FAILED, now_ns, event.error)
        engines = self._with(service)
        if not any(other.serves(service) or other.comes for other in engines) and not self._residency.loads(
            service, engines
        ):
            message = f"service {service!r} could not be loaded: {event.error}"
            for call in self._waiting.of(service):
                self._refuse(call, RefusalKind.NO_ENGINE, message, now_ns)

    def _unloaded(self, event: ServiceUnloaded, now_ns: int) -> None:
        engine = self._running(event)
        if engine is not None:
            self._actions += self._residency.moved(event.service, engine, Residence.ABSENT, now_ns)
            self._settle(now_ns)

    # Requests

    def _submit(self, told: Submitted, now_ns: int) -> None:
        if told.request in self._calls:
            return
        tokens = self._lengths.expected(told.service, told.most_tokens)
        call = Call(told, self._submitted, tokens)
        self._submitted += 1
        self._calls[told.request] = call
        self._actions += self._residency.submitted(told.service, self._engines.values())
        engines = self._open_engines(told.service)
        if engines:
            self._dispatch(call, engines, now_ns)
        else:
            self._wait(call, now_ns)

    def _progressed(self, event: Progressed, now_ns: int) -> None:
        call = self._calls.get(event.request)
        if call is None or call.engine is None:
            return
        engine = call.engine
        self._quarantine.absolve(call)
        if engine.reserved is call:
            engine.reserved = None
            # The next one in quarantine does not wait until this one is done, which may take long.
            pending = self._quarantine.pending
            if engine.takes_requests and any(engine.serves(each.told.service) for each in pending):
                self._withdraw(call, now_ns)
            self._settle(now_ns)

    def _ended(self, event: Ended, now_ns: int) -> None:
        call = self._calls.get(event.request)
        if call is None:
            return
        if event.output_tokens:
            self._lengths.record(call.told.service, event.output_tokens)
        engine = call.engine
        if engine is not None:
            del engine.calls[event.request]
        self._forget(call, now_ns)
        if self._quarantine.pending or (engine is not None and engine.reserved is call):
            self._settle(now_ns)

    def _wait(self, call: Call, now_ns: int) -> None:
        """The request has no engine and waits for one, in the order of submission."""
        call.waiting_since_ns = now_ns
        if call.quarantined_ns is None:
            self._waiting.add(call)

    def _withdraw(self, call: Call, now_ns: int) -> None:
        """Take a request from its engine, which lives."""
        assert call.engine is not None
        del call.engine.calls[call.told.request]
        self._release(call)
        self._actions.append(Withdraw(call.told.request))
        self._wait(call, now_ns)

    def _release(self, call: Call) -> None:
        """The request's engine does not have it any more."""
        if call.engine is not None:
            call.engine.load.remove(call.told.request)
            call.engine = None

    def _forget(self, call: Call, now_ns: int) -> None:
        """The request is over."""
        service = call.told.service
        self._actions += self._residency.ended(service, self._engines.values(), now_ns)
        self._release(call)
        self._quarantine.forget(call)
        self._waiting.remove(call)
        del self._calls[call.told.request]

    def _refuse(self, call: Call, kind: RefusalKind, message: str, now_ns: int) -> None:
        self._forget(call, now_ns)
        self._actions.append(Refuse(call.told.request, kind, message))

    def _give_up(self, service: str, calls: Sequence[Call], now_ns: int) -> None:
        """Refuse those that have waited for too long, if no engine of their service is ready."""
        engines = self._with(service)
        if not calls or self._residency.loads(service, engines):
            return
        if any(engine.takes_requests and engine.serves(service) for engine in engines):
            return
        for call in calls:
            if now_ns - call.waiting_since_ns >= self._wait_ns:
                message = f"no engine of service {service!r} was ready for {self._wait_s:g} s"
                self._refuse(call, RefusalKind.NO_ENGINE, message, now_ns)

    # Who gets what

    def _with(self, service: str) -> list[Engine]:
        """The engines on which a service is placed."""
        return [engine for engine in self._engines.values() if service in engine.residences]

    def _open_engines(self, service: str) -> list[EngineLoad]:
        """Loads of the engines to which requests of a service may go."""
        engines = self._open.get(service)
        if engines is None:
            engines = self._open[service] = [
                engine.load
                for engine in self._engines.values()
                if engine.serves(service) and engine.takes_requests and engine.reserved is None
            ]
        return engines

    def _settle(self, now_ns: int) -> None:
        """After a change of who takes requests: dispatch what waits, quarantined requests first."""
        self._open.clear()
        for engine in self._engines.values():
            held = engine.reserved
            if held is None or held.engine is engine:
                continue
            if held.quarantined_ns is None or not engine.takes_requests:
                engine.reserved = None
        for call in self._quarantine.pending:
            self._seat(call, now_ns)
        for service in self._waiting.services:
            engines = self._open_engines(service)
            if engines:
                for call in self._waiting.take(service):
                    self._dispatch(call, engines, now_ns)

    def _seat(self, call: Call, now_ns: int) -> None:
        """Keep an engine free for a quarantined request, and dispatch it once that has nothing else."""
        service = call.told.service
        engines = [engine for engine in self._with(service) if engine.serves(service) or engine.comes]
        chosen = self._quarantine.choose(call, engines, now_ns)
        for engine in engines:
            if engine.reserved is call and engine is not chosen:
                engine.reserved = None
        if chosen is not None:
            chosen.reserved = call
            if not chosen.calls:
                self._dispatch(call, [chosen.load], now_ns)

    def _dispatch(self, call: Call, engines: Sequence[EngineLoad], now_ns: int) -> None:
        service = call.told.service
        turn = self._dispatched.get(service, 0)
        self._dispatched[service] = turn + 1
        newcomer = Newcomer(call.told, call.tokens, turn, now_ns)
        load = engines[0] if len(engines) == 1 else self._policy.choose(newcomer, engines)
        load.add(newcomer)
        engine = self._engines[load.name]
        call.engine = engine
        call.attempt += 1
        engine.calls[call.told.request] = call
        self._actions.append(Dispatch(call.told.request, engine.name, engine.incarnation, call.attempt))


_POISON = "engines ended twice while they computed this request and nothing else; it was given up"
