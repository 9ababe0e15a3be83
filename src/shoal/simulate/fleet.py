"""The engines of a simulation, and the manager whose decisions are carried out on them."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.cluster.actions import ClusterAction, Dispatch, Refuse, StartEngine
from shoal.cluster.dispatch import DispatchPolicy
from shoal.cluster.events import (
    ClusterEvent,
    Ended,
    EngineAdded,
    EngineEnded,
    EngineReady,
    ServiceSpeed,
    Submitted,
    Ticked,
)
from shoal.cluster.manager import Manager
from shoal.cluster.options import ClusterOptions
from shoal.cluster.status import EngineState
from shoal.core import ConfigError, FinishReason, InvalidRequest, Request, SyntheticPrompt
from shoal.forecast import StepRows, StepTimes
from shoal.schedule import RequestState, SchedulerStats
from shoal.simulate.replica import Replica, VirtualClock
from shoal.simulate.spec import Deaths, EngineSpec

_OPTIONS = ClusterOptions(hung_after_s=math.inf, load_timeout_s=math.inf)
"""Simulated engines give no signs of life, so silence means nothing."""
_TICK_NS = round(_OPTIONS.heartbeat_s / 4 * 1e9)
_SPEED_TOKENS = 256
"""Length of the prompt of which an engine's speed is taken."""

Timer = tuple[int, int, ClusterEvent]
"""When, how many were set before it, and what is told then."""


class Fleet:
    """Replicas with a manager in front.

    build: makes the replica of an engine, at first and after each death. refuse: told of a request that is
    not served, the number of the engine that would not have it (-1: none), and why.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        policy: DispatchPolicy,
        clock: VirtualClock,
        build: Callable[[int], Replica],
        refuse: Callable[[Request, int, str], None],
        deaths: Deaths,
    ) -> None:
        self.replicas = [build(number) for number in range(len(specs))]
        """By number."""
        self.lost: list[list[SchedulerStats]] = [[] for _ in specs]
        """Counts of engines that died, by number."""
        self.touched: set[int] = set()
        """Engines that got something to do; whoever begins their steps empties it."""
        self._specs = specs
        self._clock = clock
        self._build = build
        self._refuse = refuse
        self._load_ns = round(deaths.load_s * 1e9)
        self._manager = Manager(_OPTIONS, policy)
        self._reads_prefixes = policy.reads_prefixes
        self._requests: dict[str, Request] = {}
        self._incarnations = [1] * len(specs)
        self._timers: list[Timer] = []
        self._timers_set = 0
        self._ticks = False
        # Between engines is chosen by them; one that is alone gets everything.
        several = len(specs) > 1
        self._speeds = [
            {name: _speed(service.times) if several else _ALONE for name, service in spec.services.items()}
            for spec in specs
        ]
        for number, spec in enumerate(specs):
            self._manager.handle(EngineAdded(str(number), tuple(spec.services)), 0)
            self._manager.handle(EngineReady(str(number), 1, self._speeds[number]), 0)
        for time_s, number in deaths.times:
            if not 0 <= number < len(specs):
                raise ConfigError(f"engine {number} cannot die: there are {len(specs)}, from 0")
            self._set(round(time_s * 1e9), EngineEnded(str(number), 0, "killed"))

    @property
    def next_ns(self) -> int | None:
        """When ``pass_time`` is to be called next; None: not at all."""
        return self._timers[0][0] if self._timers else None

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
            [context, *_] = [
                spec.services[request.service].context_tokens
                for spec in self._specs
                if request.service in spec.services
            ]
            most = max(1, context - len(prompt))
        self._requests[request.id] = request.on_clock(self._clock.now_ns)
        self._tell(Submitted(request.id, request.service, len(prompt), most, 1, hashes))

    def ended(self, state: RequestState, reason: FinishReason) -> None:
        """A request ended on its engine."""
        finished = reason in (FinishReason.STOP, FinishReason.LENGTH)
        del self._requests[state.request.id]
        self._tell(Ended(state.request.id, state.num_generated if finished else None))

    def pass_time(self) -> None:
        """Do what is due now: engines die, or have loaded, or the manager looks at its clock."""
        while self._timers and self._timers[0][0] <= self._clock.now_ns:
            event = heapq.heappop(self._timers)[2]
            if isinstance(event, EngineEnded):
                self._kill(int(event.engine), event.reason)
            elif isinstance(event, Ticked):
                self._ticks = False
                self._tell(event)
                self._tick()
            else:
                self._tell(event)

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
        self.replicas[number] = self._build(number)
        self._tell(EngineEnded(str(number), self._incarnations[number], reason))
        self._tick()

    def _tick(self) -> None:
        """Set the next tick, if the manager waits for one: an engine is to be started, or requests wait."""
        if not self._ticks and any(each.state is not EngineState.READY for each in self._manager.engines):
            self._ticks = True
            self._set(self._clock.now_ns + _TICK_NS, Ticked())

    def _set(self, time_ns: int, event: ClusterEvent) -> None:
        self._timers_set += 1
        heapq.heappush(self._timers, (time_ns, self._timers_set, event))

    def _tell(self, event: ClusterEvent) -> None:
        for action in self._manager.handle(event, self._clock.now_ns):
            self._carry_out(action)

    def _carry_out(self, action: ClusterAction) -> None:
        if isinstance(action, Dispatch):
            number = int(action.engine)
            request = _aged(self._requests[action.request], self._clock.now_ns)
            try:
                self.replicas[number].submit(request)
                self.touched.add(number)
            except InvalidRequest as error:
                del self._requests[action.request]
                self._refuse(request, number, str(error))
                self._tell(Ended(action.request))
        elif isinstance(action, StartEngine):
            number = int(action.engine)
            self._incarnations[number] = action.incarnation
            ready = EngineReady(action.engine, action.incarnation, self._speeds[number])
            self._set(self._clock.now_ns + self._load_ns, ready)
        elif isinstance(action, Refuse):
            self._refuse(self._requests.pop(action.request), -1, action.message)
        else:
            raise RuntimeError(f"no engine of a simulation is suspected, silent or drained, but: {action}")


def _aged(request: Request, now_ns: int) -> Request:
    """A request that is submitted now, whose ages were taken earlier on the same clock."""
    carried = request.carried
    if carried is None:
        return request
    since_ns = now_ns - request.arrival_ns - carried.age_ns
    aged = replace(
        carried,
        age_ns=carried.age_ns + since_ns,
        first_token_age_ns=carried.first_token_age_ns + since_ns,
        last_token_age_ns=carried.last_token_age_ns + since_ns,
    )
    return replace(request, carried=aged)


_ALONE = ServiceSpeed(prefill_s=1e-3, decode_s=1e-2)


def _speed(times: StepTimes) -> ServiceSpeed:
    """How fast a request of usual length runs alone."""
    prefill_s = times.step_time(StepRows(0, 0, ((_SPEED_TOKENS, 0),), 1))
    decode_s = times.step_time(StepRows(1, _SPEED_TOKENS + 1, (), 1))
    return ServiceSpeed(prefill_s=prefill_s / _SPEED_TOKENS, decode_s=decode_s)
