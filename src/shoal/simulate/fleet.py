"""Simulated engines behind the real cluster manager: sends it events and executes its actions."""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.manager.actions import (
    Abort,
    ClusterAction,
    Commit,
    Dispatch,
    Drop,
    Export,
    FleetChanged,
    MigrationEnded,
    MigrationOutcome,
    Refuse,
    Release,
    Reserve,
    StartEngine,
    StopEngine,
    Withdraw,
)
from shoal.cluster.manager.dispatch import DispatchPolicy, PackerDispatch
from shoal.cluster.manager.events import (
    ClusterEvent,
    Ended,
    EngineAdded,
    EngineDraining,
    EngineEnded,
    EngineReady,
    EpochBegan,
    MigrationMethod,
    MigrationWanted,
    Progressed,
    ServiceSpeed,
    SliceEnded,
    Submitted,
    Ticked,
    WeightsMoved,
)
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions
from shoal.cluster.predicted_lengths import PredictedLengths
from shoal.cluster.status import EngineState, EngineStatus
from shoal.core import ConfigError, FinishReason, InvalidRequest, Request, SyntheticPrompt
from shoal.engine import wire
from shoal.forecast import StepRows, StepTimes
from shoal.schedule import RequestState, SchedulerStats
from shoal.schedule.submission import resumable_request
from shoal.simulate.migrations import MigrationRunner, aged
from shoal.simulate.replica import Replica, VirtualClock
from shoal.simulate.spec import Deaths, EngineSpec, MigrationSpec
from shoal.simulate.timers import Timers
from shoal.simulate.up_time import UpTime

_OPTIONS = ClusterOptions(hung_after_s=math.inf, load_timeout_s=math.inf)
"""Simulated engines send no heartbeats, so silence must be ignored."""
_SPEED_TOKENS = 256
"""Prompt length for an engine's speed."""


class Fleet:
    """Replicas behind a manager.

    build: makes the replica of an engine, at first and after each death. refuse: called with a refused
    request, the number of the engine that refused it (-1: none), and the reason. note: called with the number
    of an engine and what happened to it (``Event.kind``).
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        policy: DispatchPolicy | PackerDispatch,
        clock: VirtualClock,
        build: Callable[[int], Replica],
        refuse: Callable[[Request, int, str], None],
        deaths: Deaths,
        migrations: MigrationSpec,
        note: Callable[[int, str], None],
        batching: BatchingOptions | None = None,
        fleet: FleetOptions | None = None,
    ) -> None:
        self.replicas: list[Replica] = []
        self.lost: list[list[SchedulerStats]] = [[] for _ in specs]
        """Final stats of engines that died, by number."""
        self.touched: set[int] = set()
        """Engines with new work; emptied by the caller that begins their steps."""
        self._specs = specs
        self._clock = clock
        self._make = build
        self._refuse = refuse
        self._note = note
        self._load_ns = round(deaths.load_s * 1e9)
        options = replace(_OPTIONS, packing=migrations.packing, batching=batching, fleet=fleet)
        self._tick_ns = round(options.tick_s * 1e9)
        self._manager = Manager(options, policy)
        self._lengths = None if batching is None else PredictedLengths(batching.lengths)
        self._reads_prefixes = policy.reads_prefixes
        self._requests: dict[str, Request] = {}
        self._places: dict[str, int] = {}
        """Number of the engine that got each request last."""
        self._incarnations = [1] * len(specs)
        self._up = None if fleet is None else [UpTime() for _ in specs]
        self._timers = Timers()
        self._queued_events: deque[ClusterEvent] = deque()
        """Events for the manager; the first is being handled."""
        self._ended: deque[Ended | SliceEnded] = deque()
        """Not yet sent to the manager."""
        self._ticks = False
        self.replicas += [self._build(number) for number in range(len(specs))]
        # By service: engines' limits on total tokens of a request, in rising order.
        self._total_limits = {
            name: sorted(
                {
                    min(spec.services[name].context_tokens, replica.kv_tokens[name])
                    for spec, replica in zip(specs, self.replicas, strict=True)
                    if name in spec.services
                }
            )
            for name in dict.fromkeys(name for spec in specs for name in spec.services)
        }
        self._migration_runner: MigrationRunner | None = None
        if migrations.link is not None:
            self._migration_runner = MigrationRunner(
                migrations.link,
                specs,
                self.replicas,
                self._requests,
                self._places,
                clock,
                self._timers,
                self._emit,
                self.touched.add,
            )
        # Speeds matter only for the choice between engines, and for batches.
        several = len(specs) > 1 or batching is not None
        self._speeds = [
            {name: _speed(service.times) if several else _ALONE for name, service in spec.services.items()}
            for spec in specs
        ]
        for number, spec in enumerate(specs):
            self._manager.handle(EngineAdded(str(number), tuple(spec.services)), 0)
            self._manager.handle(self._ready(number, 1), 0)
            self._report_weights(number)
        self._schedule_incidents(deaths, migrations)
        if isinstance(policy, PackerDispatch):
            self._epoch_ns = round(migrations.packing.epoch_s * 1e9)
            self._timers.set(self._epoch_ns, self._begin_epoch)

    def _schedule_incidents(self, deaths: Deaths, migrations: MigrationSpec) -> None:
        """Set the times of deaths, drains, and migrations that are wanted."""
        for time_s, number in deaths.times:
            self._set(time_s, partial(self._kill, self._checked(number, "die"), "killed"))
        for time_s, number in migrations.drains:
            self._set(time_s, partial(self._drain, self._checked(number, "be drained")))
        for time_s, request, target, method in migrations.wanted:
            engine = None if target is None else str(self._checked(target, "take requests"))
            self._set(time_s, partial(self._emit, MigrationWanted(request, engine, method)))

    @property
    def next_ns(self) -> int | None:
        """When ``pass_time`` is due next; None: never."""
        return self._timers.next_ns

    @property
    def unfinished(self) -> int:
        """Unfinished requests, waiting ones included."""
        return len(self._requests)

    def submit(self, request: Request) -> None:
        """A request arrives, of a service that some engine has."""
        prompt = request.prompt
        hashes = prompt.block_hashes if self._reads_prefixes and isinstance(prompt, SyntheticPrompt) else ()
        most = request.sampling.max_tokens
        if most is None:
            limits = self._total_limits[request.service]
            most = max(
                1, next((tokens for tokens in limits if tokens > len(prompt)), limits[-1]) - len(prompt)
            )
            if len(limits) > 1:
                # As the router does, so that it is the same on every engine.
                request = replace(request, sampling=replace(request.sampling, max_tokens=most))
        self._requests[request.id] = request.on_clock(self._clock.now_ns)
        predicted, goal_s = self._batch_facts(request, most)
        length = len(prompt)
        self._emit(Submitted(request.id, request.service, length, most, 1, hashes, True, predicted, goal_s))
        if self._manager.has_waiting or self._up is not None:
            self._tick()

    def ended(self, state: RequestState, reason: FinishReason, met: bool | None) -> None:
        """A request ended during a step of its engine; the event is sent by ``emit_ended``.

        met: as in ``Ended``.
        """
        finished = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._forget(state.request.id)
        if finished and self._lengths is not None and state.num_generated:
            self._lengths.record(state.request, state.num_generated)
        self._ended.append(Ended(state.request.id, state.num_generated if finished else None, met))

    def slice_ended(self, state: RequestState) -> None:
        """The slice of a request ended during a step of its engine; sent as ``ended`` is."""
        name = state.request.id
        self._places.pop(name, None)
        self._requests[name] = resumable_request(state, self._clock.now_ns)
        self._ended.append(SliceEnded(name, state.num_generated))

    def emit_ended(self) -> None:
        """Send ends of requests and slices to the manager, between steps."""
        while self._ended:
            event = self._ended.popleft()
            self._emit(event)
            if isinstance(event, SliceEnded):
                self._tick()

    def pass_time(self) -> None:
        """Run what is due now: deaths, loads, arrivals of KV, ticks."""
        self.emit_ended()
        self._timers.run_due(self._clock.now_ns)

    def up(self, number: int, end_ns: int) -> float | None:
        """As in ``EngineTotals``, up to the end of the run."""
        return None if self._up is None else self._up[number].total_ns(end_ns) / max(1, end_ns)

    @property
    def migrations(self) -> Mapping[tuple[MigrationMethod, MigrationOutcome], int]:
        """Finished migrations by method and outcome."""
        return sum([Counter(engine.migrations) for engine in self._manager.engines], Counter())

    @property
    def withdrawn(self) -> int:
        """As in ``RunRecord``."""
        return sum([engine.withdrawn for engine in self._manager.engines])

    def _batch_facts(self, request: Request, most_tokens: int) -> tuple[int, float | None]:
        """As the router's: what batches are formed by."""
        if self._lengths is None:
            return 0, None
        spec = next(spec for spec in self._specs if request.service in spec.services)
        service = spec.services[request.service]
        return self._lengths.facts(request, most_tokens, service.slo, service.execution_s)

    def _build(self, number: int) -> Replica:
        replica = self._make(number)
        replica.on_progress(lambda request: self._emit(Progressed(request)))
        return replica

    def _checked(self, number: int, what: str) -> int:
        if not 0 <= number < len(self._specs):
            raise ConfigError(f"engine {number} cannot {what}: there are {len(self._specs)}, from 0")
        return number

    def _ready(self, number: int, incarnation: int) -> EngineReady:
        formats = {} if self._migration_runner is None else _kv_formats(self._specs[number])
        speeds, replica = self._speeds[number], self.replicas[number]
        layout = self._specs[number].layout
        pool = (layout.total_bytes, replica.kv_tokens, layout.block_size)
        return EngineReady(str(number), incarnation, speeds, formats, *pool)

    def _begin_epoch(self) -> None:
        """Send output lengths to the manager's packer."""
        output = {}
        for name, request in self._requests.items():
            number = self._places.get(name)
            tokens = None if number is None else self.replicas[number].num_tokens(name)
            output[name] = request.num_output_tokens if tokens is None else tokens - len(request.prompt)
        self._emit(EpochBegan(output))
        self._timers.set(self._clock.now_ns + self._epoch_ns, self._begin_epoch)

    def _start(self, number: int, ready: EngineReady) -> None:
        """An engine has loaded again; where not all weights fit, it fetches some before the next request."""
        self._emit(ready)
        self._report_weights(number)
        self.touched.add(number)

    def _report_weights(self, number: int) -> None:
        """Send reports of an engine that is ready to the manager, which assumes that it has all weights."""

        def send(message: wire.FromEngine) -> None:
            assert isinstance(message, wire.WeightsMoved)
            self._emit(WeightsMoved(str(number), self._incarnations[number], message.absent))

        self.replicas[number].report_weights(send)

    def _drain(self, number: int) -> None:
        self._note(number, "drained")
        self._emit(EngineDraining(str(number)))
        self._tick()

    def _kill(self, number: int, reason: str) -> None:
        """An engine dies, without suspects."""
        if self._manager.engines[number].state in (EngineState.WAITING, EngineState.STANDBY):
            return
        self._note(number, "died")
        replica = self.replicas[number]
        owned = [name for name in self._requests if self._manager.owner(name) == str(number)]
        for request in replica.abandon(owned):
            self._requests[request.id] = request
        self._end(number, reason)

    def _end(self, number: int, reason: str) -> None:
        """An engine is gone; its next start is with a new replica."""
        self.lost[number].append(self.replicas[number].scheduler.stats())
        replica = self.replicas[number] = self._build(number)
        if self._migration_runner is not None:
            self._migration_runner.engine_started(number, replica)
        if self._up is not None:
            self._up[number].end(self._clock.now_ns)
        self._emit(EngineEnded(str(number), self._incarnations[number], reason))
        self._tick()

    def _tick(self) -> None:
        """Schedule the next tick, if it matters.

        It does while engines restart, requests wait or migrate, or draining engines have requests; and, if
        the fleet has a size, while there are requests or engines that may go to standby.
        """
        if self._ticks:
            return
        if (
            self._migration_runner
            or self._manager.has_waiting
            or self._manager.rebalances
            or (self._up is not None and (self._requests or self._manager.shrinks))
            or any(_changes(each) for each in self._manager.engines)
        ):
            self._ticks = True
            self._timers.set(self._clock.now_ns + self._tick_ns, self._ticked)

    def _ticked(self) -> None:
        self._ticks = False
        self._emit(Ticked())
        self._tick()

    def _set(self, time_s: float, do: Callable[[], None]) -> None:
        self._timers.set(round(time_s * 1e9), do)

    def _set_now(self, do: Callable[[], None]) -> None:
        self._timers.set(self._clock.now_ns, do)

    def _emit(self, event: ClusterEvent) -> None:
        """Send an event to the manager and execute its actions; nested events are queued."""
        self._queued_events.append(event)
        if len(self._queued_events) > 1:
            return
        while self._queued_events:
            for action in self._manager.handle(self._queued_events[0], self._clock.now_ns):
                self._execute(action)
            self._queued_events.popleft()

    def _execute(self, action: ClusterAction) -> None:
        if isinstance(action, MigrationEnded) and action.outcome is MigrationOutcome.DONE:
            self._note(int(action.target), "moved")
        match action:
            case Dispatch():
                self._dispatch(action)
            case Withdraw():
                self._withdraw(action.request)
            case StartEngine():
                number = int(action.engine)
                self._incarnations[number] = action.incarnation
                if self._up is not None:
                    self._up[number].start(self._clock.now_ns)
                ready = self._ready(number, action.incarnation)
                self._timers.set(self._clock.now_ns + self._load_ns, partial(self._start, number, ready))
            case StopEngine():
                number = int(action.engine)
                self._set_now(partial(self._end, number, "it goes to standby"))
            case FleetChanged():
                self._note(int(action.engine), "activated" if action.activated else "deactivated")
            case Refuse():
                if (request := self._forget(action.request)) is not None:
                    self._refuse(request, -1, action.message)
            case MigrationEnded() if self._migration_runner is None:
                pass
            case Reserve() | Export() | Commit() | Abort() | Release() | Drop() | MigrationEnded():
                assert self._migration_runner is not None
                self._migration_runner.execute(action)
                self._tick()
            case _:
                raise RuntimeError(f"no engine of a simulation is suspected or silent, but: {action}")

    def _dispatch(self, action: Dispatch) -> None:
        request, number = self._requests.get(action.request), int(action.engine)
        if request is None:
            return  # it ended when it was withdrawn
        request = aged(request, self._clock.now_ns)
        if action.batch is not None:
            request = replace(request, batch=action.batch)
        if action.slice_tokens is not None:
            request = replace(request, slice_tokens=action.slice_tokens)
        self._requests[request.id] = request
        try:
            self.replicas[number].submit(request)
        except InvalidRequest as error:
            self._forget(request.id)
            self._refuse(request, number, str(error))
            self._emit(Ended(request.id))
            return
        self._places[request.id] = number
        self.touched.add(number)
        if action.attempt > 1:
            self.replicas[number].expect(request)

    def _forget(self, name: str) -> Request | None:
        self._places.pop(name, None)
        return self._requests.pop(name, None)

    def _withdraw(self, name: str) -> None:
        number = self._places.pop(name, None)
        if number is None:
            return  # it has ended
        request = self.replicas[number].detach(name)
        self.touched.add(number)
        if request is not None:
            self._requests[name] = request


def _changes(engine: EngineStatus) -> bool:
    """Whether time may change the state of an engine."""
    if engine.state is EngineState.DRAINING:
        return bool(engine.requests) or engine.deactivating
    return engine.state not in (EngineState.READY, EngineState.STANDBY)


def _kv_formats(spec: EngineSpec) -> dict[str, str]:
    """As in ``engine.kv_format``, with the names of services as models."""
    layout = spec.layout
    if spec.scheduler.admission.slice_tokens is not None:
        return {}
    unit_bytes = layout.merged_bytes if layout.kind == "split" else 0
    return {
        name: repr((layout.kind, layout.block_size, unit_bytes, layout.services[name].shape))
        for name in spec.services
    }


_ALONE = ServiceSpeed(prefill_s=1e-3, decode_s=1e-2)


def _speed(times: StepTimes) -> ServiceSpeed:
    """Speed for a request of usual length that runs alone."""
    prefill_s = times.step_time(StepRows(0, 0, ((_SPEED_TOKENS, 0),), 1))
    decode_s = times.step_time(StepRows(1, _SPEED_TOKENS + 1, (), 1))
    return ServiceSpeed(prefill_s=prefill_s / _SPEED_TOKENS, decode_s=decode_s)
