"""The manager of a cluster: which engine runs, and which has which request."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from shoal.cluster.manager.actions import (
    ClusterAction,
    KillEngine,
    RefusalKind,
    Refuse,
    UnloadService,
    Withdraw,
)
from shoal.cluster.manager.assignment import Assignment, ByPolicy
from shoal.cluster.manager.dispatch import DispatchPolicy, PackerDispatch
from shoal.cluster.manager.engine_load import EngineLoad
from shoal.cluster.manager.events import (
    ClusterEvent,
    Ended,
    EngineAdded,
    EngineBeat,
    EngineDraining,
    EngineEnded,
    EngineFound,
    EngineLoading,
    EngineReady,
    EngineRemoved,
    EngineUndrained,
    EngineWorked,
    EpochBegan,
    MoveEvent,
    MoveWanted,
    Progressed,
    ServiceEvent,
    ServiceFailed,
    Submitted,
    Ticked,
)
from shoal.cluster.manager.expected_lengths import ExpectedLengths
from shoal.cluster.manager.migrations import Migrations
from shoal.cluster.manager.packer_chooser import PackedCalls
from shoal.cluster.manager.quarantine import Quarantine
from shoal.cluster.manager.repacking import Repacking
from shoal.cluster.manager.residency import Residency
from shoal.cluster.manager.state import Call, Engine, ManagedEngine, Residence, running_engine
from shoal.cluster.manager.supervisor import Supervisor
from shoal.cluster.options import ClusterOptions
from shoal.cluster.status import EngineState, ServiceStatus


class Manager:
    """Decides over engines and requests: a pure function of the events so far.

    It has no clock, and nothing in it is random: the same events give the same actions. What is told of
    engines may come late, twice or in another order, and of engines and incarnations that are not known any
    more: that changes nothing. What is told of requests comes from whoever accepts them, in order; unknown
    requests are ignored, and so is one that is submitted again before it ended.
    """

    def __init__(self, options: ClusterOptions, dispatch: DispatchPolicy | PackerDispatch) -> None:
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
        chooser: ByPolicy | PackedCalls
        if isinstance(dispatch, PackerDispatch):
            chooser = PackedCalls(dispatch.packer(), self._engines, options.packing.epoch_s)
        else:
            chooser = ByPolicy(dispatch)
        self._assignment = Assignment(chooser, self._engines, self._quarantine)
        self._waiting = self._assignment.waiting
        self._migrations = Migrations(self._assignment, self._engines)
        self._repacking: Repacking | None = None
        if isinstance(chooser, PackedCalls):
            moving = (self._assignment, self._migrations, self._engines, self._calls)
            self._repacking = Repacking(chooser, *moving, options.packing)
        self._actions: list[ClusterAction] = []
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            EngineAdded: self._added,
            EngineFound: self._found,
            EngineReady: self._ready,
            EngineBeat: self._beat,
            EngineLoading: self._loading,
            EngineWorked: self._worked,
            EngineEnded: self._engine_ended,
            EngineDraining: self._draining,
            EngineUndrained: self._undrained,
            EngineRemoved: self._removed,
            **dict.fromkeys(get_args(ServiceEvent), self._service_told),
            Submitted: self._submit,
            Progressed: self._progressed,
            Ended: self._ended,
            MoveWanted: self._move_wanted,
            **dict.fromkeys(get_args(MoveEvent), self._move_told),
            EpochBegan: self._epoch_began,
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
        kept = [engine for engine in engines if engine.state is not EngineState.DRAINING]
        idle_after_s, idle_since_ns = self._residency.idleness(name)
        return ServiceStatus(
            ready=sum(engine.takes_requests and engine.serves(name) for engine in engines),
            wanted=len(kept) if self._residency.wants(name) else 0,
            waiting=self.waiting(name),
            loading=sum(engine.residences[name] is Residence.LOADING for engine in engines),
            state=state,
            error=error,
            idle_after_s=idle_after_s,
            idle_since_ns=idle_since_ns,
        )

    def wakes(self, service: str) -> bool:
        """Whether requests of a service wait until engines that run have loaded it."""
        engines = self._with(service)
        if any(engine.takes_requests and engine.serves(service) for engine in engines):
            return False
        # Where it is being unloaded, it is loaded again as soon as that is done.
        coming = (Residence.LOADING, Residence.UNLOADING)
        return any(engine.residences[service] in coming for engine in engines)

    def waiting(self, service: str) -> int:
        """Requests of a service that no engine has."""
        alone = sum(call.told.service == service for call in self._quarantine.pending)
        return self._waiting.count(service) + alone

    @property
    def waits(self) -> bool:
        """Whether requests wait for an engine."""
        return bool(self._waiting) or bool(self._quarantine.pending)

    def owner(self, request: str) -> str | None:
        """The name of the engine that has a request; None: none has, or it is not known."""
        call = self._calls.get(request)
        return None if call is None or call.engine is None else call.engine.name

    def handle(self, event: ClusterEvent, now_ns: int) -> list[ClusterAction]:
        """What is to be done after an event, in this order. now_ns: when it was told, never decreasing."""
        self._actions = []
        self._handlers[type(event)](event, now_ns)
        if any(isinstance(action, UnloadService) for action in self._actions):
            self._settle(now_ns)
        if self._repacking is not None:
            self._actions += self._repacking.carry_out(now_ns)
        if self._waiting and any(isinstance(action, Withdraw) for action in self._actions):
            # The engine that had it has room for others, unless it was given back to it.
            self._actions += self._assignment.dispatch_waiting(now_ns)
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

    def _ready(self, event: EngineReady, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is None or engine.loaded:
            return
        if engine.state is EngineState.LOADING:
            engine.move(EngineState.READY)
        engine.loaded, engine.ready_ns = True, now_ns
        self._supervisor.heard(engine)
        engine.kv_formats = dict(event.kv_formats)
        engine.kv_bytes, engine.load.kv_tokens = event.kv_bytes, dict(event.kv_tokens)
        engine.block_size, engine.host = event.block_size, event.host
        engine.load.begin(event.speeds)
        self._actions += self._residency.ready(engine, event.speeds, now_ns)
        self._settle(now_ns)

    def _beat(self, event: EngineBeat, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is not None:
            self._note_kills(self._supervisor.heard(engine, event.hung), now_ns)

    def _loading(self, event: EngineLoading, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is not None:
            self._supervisor.loading(engine, event.what)

    def _worked(self, event: EngineWorked, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is not None:
            self._supervisor.worked(engine, event.cpu_s, event.read_bytes)

    def _engine_ended(self, event: EngineEnded, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is None:
            return
        self._supervisor.ended(engine, event.reason, now_ns)
        suspects = set(event.suspects)
        for request, call in list(engine.calls.items()):
            self._assignment.release(call)
            if request not in suspects or self._quarantine.blame(call, engine, now_ns):
                self._lost(call, now_ns)
            else:
                self._refuse(call, RefusalKind.POISON, _POISON, now_ns)
        self._actions += self._migrations.engine_gone(engine, now_ns)
        engine.reserved = None
        self._residency.stopped(engine)
        self._settle(now_ns)

    def _draining(self, event: EngineDraining, now_ns: int) -> None:
        engine = self._engines.get(event.engine)
        if engine is not None and engine.state is not EngineState.DRAINING:
            engine.move(EngineState.DRAINING)
            self._settle(now_ns)

    def _undrained(self, event: EngineUndrained, now_ns: int) -> None:
        engine = self._engines.get(event.engine)
        if engine is None or engine.state is not EngineState.DRAINING:
            return
        if engine.runs:
            engine.move(EngineState.READY if engine.loaded else EngineState.LOADING)
        else:
            engine.move(EngineState.WAITING)
            engine.restart_ns = now_ns
        self._settle(now_ns)

    def _removed(self, event: EngineRemoved, now_ns: int) -> None:
        engine = self._engines.pop(event.engine, None)
        if engine is None:
            return
        self._incarnations[engine.name] = engine.incarnation
        for call in list(engine.calls.values()):
            self._actions.append(Withdraw(call.told.request))
            self._assignment.release(call)
            self._lost(call, now_ns)
        self._actions += self._migrations.engine_gone(engine, now_ns)
        if engine.runs and not engine.killed:
            self._actions.append(KillEngine(engine.name, engine.incarnation, "it was removed"))
        self._settle(now_ns)

    def _ticked(self, event: Ticked, now_ns: int) -> None:
        actions = self._supervisor.tick(self._engines.values(), now_ns)
        self._note_kills(actions, now_ns)
        self._actions += self._residency.ticked(self._engines.values(), now_ns)
        self._residency.forget_removed(self._engines.values())
        for service in self._waiting.services:
            self._give_up(service, list(self._waiting.of(service)), now_ns)
        for call in self._quarantine.pending:
            self._give_up(call.told.service, [call], now_ns)
        given_up = self._migrations.ticked(now_ns)
        self._actions += given_up
        if given_up or self._quarantine.pending or self._migrations.drains:
            self._settle(now_ns)

    def _note_kills(self, actions: Sequence[ClusterAction], now_ns: int) -> None:
        self._actions += actions
        if any(isinstance(action, KillEngine) for action in actions):
            self._settle(now_ns)

    # Services

    def _service_told(self, event: ServiceEvent, now_ns: int) -> None:
        self._actions += self._residency.told(event, self._engines, now_ns)
        if isinstance(event, ServiceFailed):
            self._refuse_unloadable(event.service, event.error, now_ns)
        self._settle(now_ns)

    def _refuse_unloadable(self, service: str, error: str, now_ns: int) -> None:
        """Refuse requests of a service that could not be loaded, unless an engine may have it later."""
        engines = self._with(service)
        hopeful = any(engine.serves(service) or engine.comes for engine in engines)
        if not hopeful and not self._residency.loads(service, engines):
            message = f"service {service!r} could not be loaded: {error}"
            for call in list(self._waiting.of(service)):
                self._refuse(call, RefusalKind.NO_ENGINE, message, now_ns)

    # Requests

    def _submit(self, told: Submitted, now_ns: int) -> None:
        if told.request in self._calls:
            return
        tokens = self._lengths.expected(told.service, told.most_tokens)
        call = Call(told, self._submitted, tokens, moves_kv=told.moves_kv)
        self._submitted += 1
        self._calls[told.request] = call
        self._actions += self._residency.submitted(told.service, self._engines.values())
        dispatch = self._assignment.submit(call, now_ns)
        if dispatch is not None:
            self._actions.append(dispatch)

    def _progressed(self, event: Progressed, now_ns: int) -> None:
        call = self._calls.get(event.request)
        if call is None or call.engine is None:
            return
        engine = call.engine
        self._quarantine.absolve(call)
        if call.migration is not None:
            self._actions += self._migrations.progressed(call, now_ns)
            self._settle(now_ns)
        if engine.reserved is call:
            engine.reserved = None
            # The next one in quarantine does not wait until this one is done, which may take long.
            if engine.takes_requests and any(self._able(engine, each) for each in self._quarantine.pending):
                self._actions.append(self._assignment.withdraw(call, now_ns))
            self._settle(now_ns)

    def _ended(self, event: Ended, now_ns: int) -> None:
        call = self._calls.get(event.request)
        if call is None:
            return
        if event.output_tokens:
            self._lengths.record(call.told.service, event.output_tokens)
        alone, moved = call.quarantined_ns is not None, call.migration is not None
        self._forget(call, now_ns)
        if alone or moved or self._quarantine.pending:
            self._settle(now_ns)
        elif self._waiting:
            self._actions += self._assignment.dispatch_waiting(now_ns)

    def _lost(self, call: Call, now_ns: int) -> None:
        """A request's engine is gone, and does not have it any more."""
        self._actions += self._migrations.lost(call, now_ns)
        if call.engine is None:
            self._assignment.wait(call, now_ns)

    def _forget(self, call: Call, now_ns: int) -> None:
        """The request is over."""
        service = call.told.service
        self._actions += self._residency.ended(service, self._engines.values(), now_ns)
        if call.migration is not None:
            self._actions += self._migrations.ended(call, now_ns)
        self._assignment.release(call)
        self._quarantine.forget(call)
        self._waiting.remove(call)
        del self._calls[call.told.request]

    def _refuse(self, call: Call, kind: RefusalKind, message: str, now_ns: int) -> None:
        self._forget(call, now_ns)
        self._actions.append(Refuse(call.told.request, kind, message))

    def _give_up(self, service: str, calls: Sequence[Call], now_ns: int) -> None:
        """Refuse those that have waited for too long, if no engine that could have them is ready."""
        engines = self._with(service)
        if not calls or self._residency.loads(service, engines):
            return
        ready = [engine for engine in engines if engine.takes_requests and engine.serves(service)]
        for call in calls:
            if now_ns - call.waiting_since_ns < self._wait_ns or self._assignment.able(call, ready):
                continue
            large = f" with KV memory for {call.told.longest} tokens" if ready else ""
            message = f"no engine of service {service!r}{large} was ready for {self._wait_s:g} s"
            self._refuse(call, RefusalKind.NO_ENGINE, message, now_ns)

    # Moves

    def _epoch_began(self, event: EpochBegan, now_ns: int) -> None:
        if self._repacking is not None:
            self._repacking.begin_epoch(event)
            self._actions += self._repacking.carry_out(now_ns)
            self._actions += self._assignment.dispatch_waiting(now_ns)

    def _move_wanted(self, event: MoveWanted, now_ns: int) -> None:
        call = self._calls.get(event.request)
        if call is not None:
            self._actions += self._migrations.want(call, event.engine, event.method, now_ns)

    def _move_told(self, event: MoveEvent, now_ns: int) -> None:
        self._actions += self._migrations.told(event, now_ns)
        self._settle(now_ns)

    # Who gets what

    def _able(self, engine: Engine, call: Call) -> bool:
        """Whether a request may go to an engine that takes requests."""
        engines = [each for each in self._with(call.told.service) if each.serves(call.told.service)]
        return engine in self._assignment.able(call, engines)

    def _with(self, service: str) -> list[Engine]:
        """The engines on which a service is placed."""
        return [engine for engine in self._engines.values() if service in engine.residences]

    def _settle(self, now_ns: int) -> None:
        """After a change of who takes requests, or of who has which."""
        self._actions += self._assignment.settle(now_ns)
        self._actions += self._migrations.drain(now_ns)


_POISON = "engines ended twice while they computed this request and nothing else; it was given up"
