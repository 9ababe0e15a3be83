"""The engines of a simulation, and the manager whose decisions are carried out on them."""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from shoal.cluster.manager.actions import (
    Abort,
    ClusterAction,
    Commit,
    Dispatch,
    Drop,
    Export,
    MoveEnded,
    MoveOutcome,
    Refuse,
    Release,
    Reserve,
    StartEngine,
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
    MoveMethod,
    MoveWanted,
    Progressed,
    ServiceSpeed,
    Submitted,
    Ticked,
)
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions
from shoal.cluster.status import EngineState
from shoal.core import ConfigError, FinishReason, InvalidRequest, Request, SyntheticPrompt
from shoal.forecast import StepRows, StepTimes
from shoal.schedule import RequestState, SchedulerStats
from shoal.simulate.migrations import Moves, aged
from shoal.simulate.replica import Replica, VirtualClock
from shoal.simulate.spec import Deaths, EngineSpec, Moving
from shoal.simulate.timers import Timers

_OPTIONS = ClusterOptions(hung_after_s=math.inf, load_timeout_s=math.inf)
"""Simulated engines give no signs of life, so silence means nothing."""
_TICK_NS = round(_OPTIONS.heartbeat_s / 4 * 1e9)
_SPEED_TOKENS = 256
"""Length of the prompt of which an engine's speed is taken."""


class Fleet:
    """Replicas with a manager in front.

    build: makes the replica of an engine, at first and after each death. refuse: told of a request that is
    not served, the number of the engine that would not have it (-1: none), and why.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        policy: DispatchPolicy | PackerDispatch,
        clock: VirtualClock,
        build: Callable[[int], Replica],
        refuse: Callable[[Request, int, str], None],
        deaths: Deaths,
        moving: Moving,
    ) -> None:
        self.replicas: list[Replica] = []
        """By number."""
        self.lost: list[list[SchedulerStats]] = [[] for _ in specs]
        """Counts of engines that died, by number."""
        self.touched: set[int] = set()
        """Engines that got something to do; whoever begins their steps empties it."""
        self._specs = specs
        self._clock = clock
        self._make = build
        self._refuse = refuse
        self._load_ns = round(deaths.load_s * 1e9)
        self._manager = Manager(replace(_OPTIONS, packing=moving.packing), policy)
        self._reads_prefixes = policy.reads_prefixes
        self._requests: dict[str, Request] = {}
        self._places: dict[str, int] = {}
        """Numbers of the engines that were given requests last."""
        self._incarnations = [1] * len(specs)
        self._timers = Timers()
        self._untold: deque[ClusterEvent] = deque()
        """What the manager is to be told; the first is it just being told."""
        self._ended: deque[Ended] = deque()
        """Of which the manager was not told yet."""
        self._ticks = False
        self.replicas += [self._build(number) for number in range(len(specs))]
        # Most tokens of a request, prompt and output, that engines take, by service, the smallest first.
        self._rooms = {
            name: sorted(
                {
                    min(spec.services[name].context_tokens, replica.kv_tokens[name])
                    for spec, replica in zip(specs, self.replicas, strict=True)
                    if name in spec.services
                }
            )
            for name in dict.fromkeys(name for spec in specs for name in spec.services)
        }
        self._moves: Moves | None = None
        if moving.link is not None:
            self._moves = Moves(
                moving.link,
                specs,
                self.replicas,
                self._requests,
                self._places,
                clock,
                self._timers,
                self._tell,
                self.touched.add,
            )
        # Between engines is chosen by them; one that is alone gets everything.
        several = len(specs) > 1
        self._speeds = [
            {name: _speed(service.times) if several else _ALONE for name, service in spec.services.items()}
            for spec in specs
        ]
        for number, spec in enumerate(specs):
            self._manager.handle(EngineAdded(str(number), tuple(spec.services)), 0)
            self._manager.handle(self._ready(number, 1), 0)
        for time_s, number in deaths.times:
            self._set(time_s, partial(self._kill, self._checked(number, "die"), "killed"))
        for time_s, number in moving.drains:
            self._set(time_s, partial(self._drain, self._checked(number, "be drained")))
        for time_s, request, target, method in moving.wanted:
            engine = None if target is None else str(self._checked(target, "take requests"))
            self._set(time_s, partial(self._tell, MoveWanted(request, engine, method)))
        if isinstance(policy, PackerDispatch):
            self._epoch_ns = round(moving.packing.epoch_s * 1e9)
            self._timers.set(self._epoch_ns, self._begin_epoch)

    @property
    def next_ns(self) -> int | None:
        """When ``pass_time`` is to be called next; None: not at all."""
        return self._timers.next_ns

    @property
    def unfinished(self) -> int:
        """Requests that have not ended, and those that no engine has."""
        return len(self._requests)

    def submit(self, request: Request) -> None:
        """A request arrives for a service that engines have."""
        prompt = request.prompt
        hashes = prompt.block_hashes if self._reads_prefixes and isinstance(prompt, SyntheticPrompt) else ()
        most = request.sampling.max_tokens
        if most is None:
            rooms = self._rooms[request.service]
            most = max(1, next((room for room in rooms if room > len(prompt)), rooms[-1]) - len(prompt))
            if len(rooms) > 1:
                # As a router does, so that it is the same on every engine.
                request = replace(request, sampling=replace(request.sampling, max_tokens=most))
        self._requests[request.id] = request.on_clock(self._clock.now_ns)
        self._tell(Submitted(request.id, request.service, len(prompt), most, 1, hashes))
        if self._manager.waits:
            self._tick()

    def ended(self, state: RequestState, reason: FinishReason) -> None:
        """A request ended on its engine, which is in the midst of a step: the manager is told afterwards."""
        finished = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._forget(state.request.id)
        self._ended.append(Ended(state.request.id, state.num_generated if finished else None))

    def tell_ended(self) -> None:
        """Tell the manager who has ended; no engine is in the midst of anything."""
        while self._ended:
            self._tell(self._ended.popleft())

    def pass_time(self) -> None:
        """Do what is due now: engines die, or have loaded, KV arrives, or the manager looks at its clock."""
        self.tell_ended()
        self._timers.run_due(self._clock.now_ns)

    @property
    def moves(self) -> Mapping[tuple[MoveMethod, MoveOutcome], int]:
        """Moves of running requests that are over."""
        return sum([Counter(engine.moves) for engine in self._manager.engines], Counter())

    @property
    def withdrawn(self) -> int:
        """As in ``RunRecord``."""
        return sum([engine.withdrawn for engine in self._manager.engines])

    def _build(self, number: int) -> Replica:
        replica = self._make(number)
        replica.tell_progress(lambda request: self._tell(Progressed(request)))
        return replica

    def _checked(self, number: int, what: str) -> int:
        if not 0 <= number < len(self._specs):
            raise ConfigError(f"engine {number} cannot {what}: there are {len(self._specs)}, from 0")
        return number

    def _ready(self, number: int, incarnation: int) -> EngineReady:
        formats = {} if self._moves is None else _kv_formats(self._specs[number])
        speeds, replica = self._speeds[number], self.replicas[number]
        layout = self._specs[number].layout
        pool = (layout.total_bytes, replica.kv_tokens, layout.block_size)
        return EngineReady(str(number), incarnation, speeds, formats, *pool)

    def _begin_epoch(self) -> None:
        """Tell the manager how far requests are, for its packer."""
        output = {}
        for name, request in self._requests.items():
            number = self._places.get(name)
            tokens = None if number is None else self.replicas[number].num_tokens(name)
            output[name] = request.num_output_tokens if tokens is None else tokens - len(request.prompt)
        self._tell(EpochBegan(output))
        self._timers.set(self._clock.now_ns + self._epoch_ns, self._begin_epoch)

    def _drain(self, number: int) -> None:
        self._tell(EngineDraining(str(number)))
        self._tick()

    def _kill(self, number: int, reason: str) -> None:
        """An engine dies, or loads no further; nobody is to blame."""
        waits = self._manager.engines[number].state is EngineState.WAITING
        if waits:
            return
        replica = self.replicas[number]
        owned = [name for name in self._requests if self._manager.owner(name) == str(number)]
        for request in replica.abandon(owned):
            self._requests[request.id] = request
        self.lost[number].append(replica.scheduler.stats())
        replica = self.replicas[number] = self._build(number)
        if self._moves is not None:
            self._moves.began(number, replica)
        self._tell(EngineEnded(str(number), self._incarnations[number], reason))
        self._tick()

    def _tick(self) -> None:
        """Set the next tick, if the manager waits for one.

        It does while an engine is to be started, requests wait, or are to leave engines.
        """
        if self._ticks:
            return
        if (
            self._moves
            or self._manager.waits
            or any(
                each.requests if each.state is EngineState.DRAINING else each.state is not EngineState.READY
                for each in self._manager.engines
            )
        ):
            self._ticks = True
            self._timers.set(self._clock.now_ns + _TICK_NS, self._ticked)

    def _ticked(self) -> None:
        self._ticks = False
        self._tell(Ticked())
        self._tick()

    def _set(self, time_s: float, do: Callable[[], None]) -> None:
        self._timers.set(round(time_s * 1e9), do)

    def _tell(self, event: ClusterEvent) -> None:
        """Tell the manager what happened, and carry out what it decides, one event after the other."""
        self._untold.append(event)
        if len(self._untold) > 1:
            return
        while self._untold:
            for action in self._manager.handle(self._untold[0], self._clock.now_ns):
                self._carry_out(action)
            self._untold.popleft()

    def _carry_out(self, action: ClusterAction) -> None:
        match action:
            case Dispatch():
                self._dispatch(action)
            case Withdraw():
                self._withdraw(action.request)
            case StartEngine():
                number = int(action.engine)
                self._incarnations[number] = action.incarnation
                ready = self._ready(number, action.incarnation)
                self._timers.set(self._clock.now_ns + self._load_ns, partial(self._tell, ready))
            case Refuse():
                if (request := self._forget(action.request)) is not None:
                    self._refuse(request, -1, action.message)
            case MoveEnded() if self._moves is None:
                pass
            case Reserve() | Export() | Commit() | Abort() | Release() | Drop() | MoveEnded():
                assert self._moves is not None
                self._moves.carry_out(action)
                self._tick()
            case _:
                raise RuntimeError(f"no engine of a simulation is suspected or silent, but: {action}")

    def _dispatch(self, action: Dispatch) -> None:
        request, number = self._requests.get(action.request), int(action.engine)
        if request is None:
            return  # it ended when it was withdrawn
        request = aged(request, self._clock.now_ns)
        try:
            self.replicas[number].submit(request)
        except InvalidRequest as error:
            self._forget(request.id)
            self._refuse(request, number, str(error))
            self._tell(Ended(request.id))
            return
        self._places[request.id] = number
        self.touched.add(number)
        if action.attempt > 1:
            self.replicas[number].expect(request)

    def _forget(self, name: str) -> Request | None:
        """A request has ended."""
        self._places.pop(name, None)
        return self._requests.pop(name, None)

    def _withdraw(self, name: str) -> None:
        """Take a request from the engine that has it."""
        number = self._places.pop(name, None)
        if number is None:
            return  # it has ended
        request = self.replicas[number].detach(name)
        self.touched.add(number)
        if request is not None:
            self._requests[name] = request


def _kv_formats(spec: EngineSpec) -> dict[str, str]:
    """As in ``engine.kv_format``, where the engine's models are those of their services' names."""
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
    """How fast a request of usual length runs alone."""
    prefill_s = times.step_time(StepRows(0, 0, ((_SPEED_TOKENS, 0),), 1))
    decode_s = times.step_time(StepRows(1, _SPEED_TOKENS + 1, (), 1))
    return ServiceSpeed(prefill_s=prefill_s / _SPEED_TOKENS, decode_s=decode_s)
