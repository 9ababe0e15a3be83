"""The manager: handles events of engines, services and requests, and returns actions."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from shoal.cluster.manager.actions import (
    ClusterAction,
    KillEngine,
    RefusalKind,
    Refuse,
    UnloadService,
    Withdraw,
)
from shoal.cluster.manager.activation import Activation
from shoal.cluster.manager.assignment import Assignment, PolicyChooser
from shoal.cluster.manager.cluster_view import ClusterView
from shoal.cluster.manager.dispatch import DispatchPolicy, PackerDispatch
from shoal.cluster.manager.engine_load import EngineLoad
from shoal.cluster.manager.events import (
    ClusterEvent,
    Ended,
    EngineActivated,
    EngineAdded,
    EngineDeactivated,
    EngineDraining,
    EngineEnded,
    EngineFound,
    EngineHeartbeat,
    EngineLoading,
    EngineProcessUsage,
    EngineReady,
    EngineRemoved,
    EngineUndrained,
    EpochBegan,
    MigrationEvent,
    MigrationWanted,
    Progressed,
    ServiceEvent,
    ServiceFailed,
    SliceEnded,
    Submitted,
    Ticked,
    WeightsFailed,
    WeightsMoved,
)
from shoal.cluster.manager.expected_lengths import ExpectedLengths
from shoal.cluster.manager.fleet_size import FleetSizer
from shoal.cluster.manager.migrations import Migrations
from shoal.cluster.manager.overdue import Overdue
from shoal.cluster.manager.packer_chooser import PackerChooser
from shoal.cluster.manager.quarantine import Quarantine
from shoal.cluster.manager.rebalancing import Rebalancing
from shoal.cluster.manager.repacking import Repacking
from shoal.cluster.manager.residency import Residency
from shoal.cluster.manager.state import Engine, ManagedCall, running_engine
from shoal.cluster.manager.supervisor import Supervisor
from shoal.cluster.options import ClusterOptions
from shoal.cluster.status import EngineState


class Manager(ClusterView):
    """Decides about engines and requests, as a pure function of the events so far.

    It has no clock and no randomness: the same events give the same actions. Events of engines may be late,
    duplicate or reordered; those of unknown engines and of earlier incarnations are ignored. Events of
    requests come in order from the router; those of unknown requests are ignored, and so is a second
    ``Submitted`` of an unfinished one.
    """

    def __init__(self, options: ClusterOptions, dispatch: DispatchPolicy | PackerDispatch) -> None:
        self._policy = dispatch
        self._residency = Residency()
        self._supervisor = Supervisor(options, self._residency.services_to_load)
        self._quarantine = Quarantine(round(options.wait_for_engine_s * 1e9))
        self._lengths = ExpectedLengths()
        self._engines: dict[str, Engine] = {}
        # The last incarnation of every removed engine, so that none is used twice.
        self._incarnations: dict[str, int] = {}
        self._activation = Activation(self._engines, self._supervisor)
        self._calls: dict[str, ManagedCall] = {}
        self._submitted = 0
        chooser: PolicyChooser | PackerChooser
        if isinstance(dispatch, PackerDispatch):
            chooser = PackerChooser(
                dispatch.packer(options.packing.tuning), self._engines, options.packing.epoch_s
            )
        else:
            chooser = PolicyChooser(dispatch)
        self._assignment = Assignment(
            chooser,
            self._engines,
            self._quarantine,
            options.batching,
            standby_returns=options.fleet is not None,
        )
        self._waiting = self._assignment.waiting
        self._overdue = Overdue(options.wait_for_engine_s, self._assignment)
        self._migrations = Migrations(self._assignment, self._engines)
        parts = (self._residency, self._assignment, self._quarantine)
        super().__init__(self._engines, self._calls, *parts)
        self._rebalancing: Rebalancing | None = None
        if isinstance(chooser, PolicyChooser) and options.batching is None:
            self._rebalancing = Rebalancing(self._engines, self._migrations)
        self._repacking: Repacking | None = None
        if isinstance(chooser, PackerChooser):
            self._repacking = Repacking(
                chooser, self._assignment, self._migrations, self._engines, self._calls, options.packing
            )
        self._sizer: FleetSizer | None = None
        if options.fleet is not None:
            self._sizer = FleetSizer(options.fleet, self._engines, self._activation, self._waiting.all)
        self._actions: list[ClusterAction] = []
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            EngineAdded: self._engine_added,
            EngineFound: self._engine_found,
            EngineReady: self._engine_ready,
            EngineHeartbeat: self._engine_heartbeat,
            EngineLoading: self._engine_loading,
            EngineProcessUsage: self._engine_usage,
            EngineEnded: self._engine_ended,
            EngineDraining: self._engine_draining,
            EngineUndrained: self._engine_undrained,
            EngineActivated: self._engine_activated,
            EngineDeactivated: self._engine_deactivated,
            EngineRemoved: self._engine_removed,
            **dict.fromkeys(get_args(ServiceEvent), self._service_event),
            Submitted: self._submit,
            WeightsMoved: self._weights_moved,
            Progressed: self._progressed,
            SliceEnded: self._slice_ended,
            WeightsFailed: self._weights_failed,
            Ended: self._ended,
            MigrationWanted: self._migration_wanted,
            **dict.fromkeys(get_args(MigrationEvent), self._migration_event),
            EpochBegan: self._epoch_began,
            Ticked: self._ticked,
        }

    @property
    def wanted_engines(self) -> int:
        """Number of engines that are to run."""
        if self._sizer is not None:
            return self._sizer.wanted
        return sum(engine.active for engine in self._engines.values())

    @property
    def rebalances(self) -> bool:
        """Whether requests move to engines that are new."""
        return self._rebalancing is not None and self._rebalancing.active

    @property
    def shrinks(self) -> bool:
        """Whether engines may go to standby in time, even without further events."""
        return self._sizer is not None and not self._sizer.settled

    def handle(self, event: ClusterEvent, now_ns: int) -> list[ClusterAction]:
        """Actions that follow from an event, in order. now_ns: the time of this call, never decreasing."""
        self._actions = []
        self._handlers[type(event)](event, now_ns)
        self._actions += self._residency.unload_left(self._engines)
        if any(isinstance(action, UnloadService) for action in self._actions):
            self._settle(now_ns)
        if self._repacking is not None:
            self._actions += self._repacking.execute(now_ns)
        if self._waiting and any(isinstance(action, Withdraw) for action in self._actions):
            # Its engine may have room for other requests.
            self._actions += self._assignment.dispatch_waiting(now_ns)
        return self._actions

    # Engines

    def _engine_added(self, event: EngineAdded, now_ns: int) -> None:
        if event.engine in self._engines:
            return
        incarnation = self._incarnations.get(event.engine, 0)
        engine = self._add(event.engine, event.services, incarnation, now_ns)
        self._actions.append(self._supervisor.start(engine, incarnation + 1))

    def _engine_found(self, event: EngineFound, now_ns: int) -> None:
        known = self._incarnations.get(event.engine, 0) >= event.incarnation
        if event.engine not in self._engines and not known:
            engine = self._add(event.engine, event.services, event.incarnation, now_ns)
            self._supervisor.watch(engine)

    def _add(self, name: str, services: tuple[str, ...], incarnation: int, now_ns: int) -> Engine:
        load = EngineLoad(name, indexes_prefixes=self._policy.reads_prefixes)
        engine = Engine(load, EngineState.LOADING, incarnation, runs=False)
        self._engines[name] = engine
        for service in services:
            self._residency.add(service, engine, now_ns)
        return engine

    def _engine_ready(self, event: EngineReady, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is None or engine.loaded:
            return
        if engine.state is EngineState.LOADING:
            engine.transition_to(EngineState.READY)
        engine.loaded, engine.ready_ns = True, now_ns
        self._supervisor.heartbeat(engine)
        engine.kv_formats = dict(event.kv_formats)
        engine.kv_bytes, engine.load.kv_tokens = event.kv_bytes, dict(event.kv_tokens)
        engine.block_size, engine.host = event.block_size, event.host
        engine.load.begin(event.speeds)
        self._actions += self._residency.ready(engine, event.speeds, now_ns)
        self._opened(engine, now_ns)
        self._settle(now_ns)

    def _engine_heartbeat(self, event: EngineHeartbeat, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is not None:
            self._add_kills(self._supervisor.heartbeat(engine, event.hung), now_ns)

    def _engine_loading(self, event: EngineLoading, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is not None:
            self._supervisor.loading_progress(engine, event.what)

    def _engine_usage(self, event: EngineProcessUsage, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is not None:
            self._supervisor.usage(engine, event.cpu_s, event.read_bytes)

    def _engine_ended(self, event: EngineEnded, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is None:
            return
        self._supervisor.engine_ended(engine, event.reason, now_ns)
        suspects = set(event.suspects)
        for request, call in list(engine.calls.items()):
            self._assignment.release(call)
            if request not in suspects or self._quarantine.record_death(call, engine, now_ns):
                self._lost(call, now_ns)
            else:
                self._refuse(call, RefusalKind.POISON, _POISON, now_ns)
        self._actions += self._migrations.engine_ended(engine, now_ns)
        engine.reserved = None
        self._residency.stopped(engine)
        self._settle(now_ns)

    def _engine_draining(self, event: EngineDraining, now_ns: int) -> None:
        self._activation.drain(event.engine)
        self._settle(now_ns)

    def _engine_undrained(self, event: EngineUndrained, now_ns: int) -> None:
        self._activation.undrain(event.engine, now_ns)
        self._opened(self._engines.get(event.engine), now_ns)
        self._settle(now_ns)

    def _engine_activated(self, event: EngineActivated, now_ns: int) -> None:
        self._actions += self._activation.activate(event.engine, now_ns)
        self._opened(self._engines.get(event.engine), now_ns)
        self._settle(now_ns)

    def _engine_deactivated(self, event: EngineDeactivated, now_ns: int) -> None:
        self._activation.deactivate(event.engine)
        self._settle(now_ns)
        self._actions += self._activation.stop_drained()

    def _opened(self, engine: Engine | None, now_ns: int) -> None:
        """Fill an engine that takes requests again."""
        if self._rebalancing is not None and engine is not None and engine.accepts_requests:
            self._rebalancing.engine_opened(engine, now_ns)

    def _engine_removed(self, event: EngineRemoved, now_ns: int) -> None:
        engine = self._engines.pop(event.engine, None)
        if engine is None:
            return
        self._incarnations[engine.name] = engine.incarnation
        for call in list(engine.calls.values()):
            self._actions.append(Withdraw(call.id))
            self._assignment.release(call)
            self._lost(call, now_ns)
        self._actions += self._migrations.engine_ended(engine, now_ns)
        if engine.runs and not engine.killed:
            self._actions.append(KillEngine(engine.name, engine.incarnation, "it was removed"))
        self._settle(now_ns)

    def _ticked(self, event: Ticked, now_ns: int) -> None:
        actions = self._supervisor.tick(self._engines.values(), now_ns)
        self._add_kills(actions, now_ns)
        if self._sizer is not None and (changes := self._sizer.tick(now_ns)):
            self._actions += changes
            self._settle(now_ns)
        self._actions += self._activation.stop_drained()
        self._actions += self._residency.ticked(self._engines.values(), now_ns)
        self._residency.forget_removed(self._engines.values())
        self._refuse_overdue(now_ns)
        if self._rebalancing is not None:
            self._actions += self._rebalancing.tick(now_ns)
        given_up = self._migrations.ticked(now_ns)
        self._actions += given_up
        if given_up or self._quarantine.pending or self._migrations.draining:
            self._settle(now_ns)
        elif self._assignment.batches is not None:
            self._actions += self._assignment.dispatch_waiting(now_ns)

    def _add_kills(self, actions: Sequence[ClusterAction], now_ns: int) -> None:
        self._actions += actions
        if any(isinstance(action, KillEngine) for action in actions):
            self._settle(now_ns)

    # Services

    def _service_event(self, event: ServiceEvent, now_ns: int) -> None:
        self._actions += self._residency.handle(event, self._engines, now_ns)
        if isinstance(event, ServiceFailed):
            self._refuse_unloadable(event.service, event.error, now_ns)
        self._settle(now_ns)

    def _refuse_unloadable(self, service: str, error: str, now_ns: int) -> None:
        """Refuse requests of a service that failed to load, unless an engine may have it later."""
        engines = self.engines_of(service)
        possible = any(engine.serves(service) or engine.will_accept_requests for engine in engines)
        if not possible and not self._residency.is_loading(service, engines):
            message = f"service {service!r} could not be loaded: {error}"
            for call in list(self._waiting.of(service)):
                self._refuse(call, RefusalKind.NO_ENGINE, message, now_ns)

    def _weights_moved(self, event: WeightsMoved, now_ns: int) -> None:
        engine = running_engine(self._engines, event)
        if engine is not None:
            engine.load.weights_moved(event.absent)

    # Requests

    def _submit(self, event: Submitted, now_ns: int) -> None:
        if event.request in self._calls:
            return
        tokens = self._lengths.expected(event.service, event.most_tokens)
        call = ManagedCall(event, self._submitted, tokens, kv_transferable=event.kv_transferable)
        batches = self._assignment.batches
        if batches is not None:
            call.pooled = batches.pooled(event, self._submitted, tokens, now_ns)
        self._submitted += 1
        self._calls[event.request] = call
        self._actions += self._residency.submitted(event.service, self._engines.values())
        self._actions += self._assignment.submit(call, now_ns)

    def _slice_ended(self, event: SliceEnded, now_ns: int) -> None:
        """A request waits for its next batch."""
        call = self._calls.get(event.request)
        if call is None or call.engine is None or call.pooled is None:
            return
        call.pooled = call.pooled.after(event.output_tokens - call.pooled.output_tokens)
        if call.migration is not None:
            self._actions += self._migrations.ended(call, now_ns)
        self._assignment.release(call)
        self._assignment.enqueue(call, now_ns)
        self._settle(now_ns)

    def _progressed(self, event: Progressed, now_ns: int) -> None:
        call = self._calls.get(event.request)
        if call is None or call.engine is None:
            return
        engine = call.engine
        self._quarantine.clear(call)
        if call.migration is not None:
            self._actions += self._migrations.progressed(call, now_ns)
            self._settle(now_ns)
        if engine.reserved is call:
            engine.reserved = None
            # The next quarantined request need not wait until this one has finished.
            if engine.accepts_requests and any(
                self._has_room(engine, each) for each in self._quarantine.pending
            ):
                self._actions.append(self._assignment.withdraw(call, now_ns))
            self._settle(now_ns)

    def _weights_failed(self, event: WeightsFailed, now_ns: int) -> None:
        """A request goes on at an engine that has not failed to load its weights, if there is one."""
        call = self._calls.get(event.request)
        if call is None or call.engine is None:
            return
        call.unloadable_on.add(call.engine.name)
        engines = self.engines_of(call.service)
        others = [each for each in engines if each.serves(call.service) or each.will_accept_requests]
        if not self._assignment.with_room(call, others):
            message = f"service {call.service!r} cannot be served now: {event.error}"
            self._refuse(call, RefusalKind.NO_ENGINE, message, now_ns)
            return
        if call.migration is not None:
            self._actions += self._migrations.ended(call, now_ns)
        self._actions.append(self._assignment.withdraw(call, now_ns))

    def _ended(self, event: Ended, now_ns: int) -> None:
        call = self._calls.get(event.request)
        if call is None:
            return
        if self._sizer is not None:
            self._sizer.ended(event.met)
        if event.output_tokens:
            self._lengths.record(call.service, event.output_tokens)
        quarantined, migrating = call.quarantined_ns is not None, call.migration is not None
        self._forget(call, now_ns)
        if quarantined or migrating or self._quarantine.pending:
            self._settle(now_ns)
        elif self._waiting:
            self._actions += self._assignment.dispatch_waiting(now_ns)

    def _lost(self, call: ManagedCall, now_ns: int) -> None:
        """A request's engine is gone; the request is released already."""
        self._actions += self._migrations.lost(call, now_ns)
        if call.engine is None:
            self._assignment.enqueue(call, now_ns)

    def _forget(self, call: ManagedCall, now_ns: int) -> None:
        service = call.service
        self._actions += self._residency.ended(service, self._engines.values(), now_ns)
        if call.migration is not None:
            self._actions += self._migrations.ended(call, now_ns)
        self._assignment.release(call)
        self._quarantine.forget(call)
        self._waiting.remove(call)
        del self._calls[call.id]

    def _refuse(self, call: ManagedCall, kind: RefusalKind, message: str, now_ns: int) -> None:
        self._forget(call, now_ns)
        self._actions.append(Refuse(call.id, kind, message))

    def _refuse_overdue(self, now_ns: int) -> None:
        """Refuse requests that have waited for too long."""
        for service in self._waiting.services:
            self._refuse_each(service, list(self._waiting.of(service)), now_ns)
        for call in self._quarantine.pending:
            self._refuse_each(call.service, [call], now_ns)
        self._overdue.ticked(now_ns)

    def _refuse_each(self, service: str, calls: Sequence[ManagedCall], now_ns: int) -> None:
        if self._residency.is_loading(service, self.engines_of(service)):
            return
        for call, message in self._overdue.find(service, calls, self.engines_of(service), now_ns):
            self._refuse(call, RefusalKind.NO_ENGINE, message, now_ns)

    # Migrations and packing

    def _epoch_began(self, event: EpochBegan, now_ns: int) -> None:
        if self._repacking is not None:
            self._repacking.begin_epoch(event)
            self._actions += self._repacking.execute(now_ns)
            self._actions += self._assignment.dispatch_waiting(now_ns)

    def _migration_wanted(self, event: MigrationWanted, now_ns: int) -> None:
        call = self._calls.get(event.request)
        if call is not None:
            self._actions += self._migrations.start(call, event.engine, event.method, now_ns)

    def _migration_event(self, event: MigrationEvent, now_ns: int) -> None:
        self._actions += self._migrations.handle(event, now_ns)
        self._settle(now_ns)

    # Room

    def _has_room(self, engine: Engine, call: ManagedCall) -> bool:
        """Whether an open engine has room for a request."""
        engines = [each for each in self.engines_of(call.service) if each.serves(call.service)]
        return engine in self._assignment.with_room(call, engines)

    def _settle(self, now_ns: int) -> None:
        """Dispatch and drain after a change of open engines or assignments."""
        self._actions += self._assignment.settle(now_ns)
        self._actions += self._migrations.drain(now_ns)


_POISON = "engines ended twice while they computed this request and nothing else; it was given up"
