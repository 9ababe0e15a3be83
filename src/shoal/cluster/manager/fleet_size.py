"""Size of the fleet: how many engines requests need, and which go to standby or come back.

Mell's Algorithm 1 activates a GPU where requests find no room, and terminates one without requests. Here a
forecast decides, for any dispatch: of KV memory, of requests, and of goals.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median_low
from typing import NamedTuple

from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.manager.actions import FleetChanged, StartEngine
from shoal.cluster.manager.activation import Activation
from shoal.cluster.manager.engine_load import MILLION, UnassignedRequest
from shoal.cluster.manager.goal_limit import GoalLimit
from shoal.cluster.manager.state import Engine, ManagedCall
from shoal.cluster.status import EngineState

_PARTS = 5
"""Parts of the time that a start takes, between which growth is measured."""
_FIRST_START_NS = 10_000_000_000
"""Assumed time of a start before one was seen."""


class Need(NamedTuple):
    """What unfinished requests need."""

    memory: float
    """KV at their end, in engines of usual size."""
    requests: float
    """Their number, each choice counted."""


class FleetSizer:
    """Decides at every tick how many engines are to run.

    engines: all, by name. waiting: gives the requests without an engine. More engines are started at once;
    one goes to standby when fewer have sufficed for ``FleetOptions.idle_s``.
    """

    def __init__(
        self,
        options: FleetOptions,
        engines: Mapping[str, Engine],
        activation: Activation,
        waiting: Callable[[], Iterable[ManagedCall]],
    ) -> None:
        self._options = options
        self._engines = engines
        self._activation = activation
        self._waiting = waiting
        self._goals = None if options.attainment is None else GoalLimit(options.attainment)
        self._needs: deque[tuple[int, Need]] = deque()
        # Numbers of wanted engines over the idle time, falling: the first is the largest.
        self._wanted: deque[tuple[int, int]] = deque()
        self._started_ns: dict[tuple[str, int], int] = {}
        self._start_ns = _FIRST_START_NS
        self.wanted = options.min
        """Number of engines that are to run now."""
        self.why = ""
        """What needs them, in words."""

    def ended(self, met: bool | None) -> None:
        """A request ended. met: whether it met its goals; None: it has none."""
        if self._goals is not None and met is not None:
            self._goals.ended(met)

    def tick(self, now_ns: int) -> list[StartEngine | FleetChanged]:
        """Activate engines that are needed, and deactivate those that are not."""
        self._learn_start(now_ns)
        running = [
            engine
            for engine in self._engines.values()
            if engine.state in (EngineState.READY, EngineState.LOADING) and not engine.killed
        ]
        self._size(running, now_ns)
        if len(running) < self.wanted:
            return self._grow(self.wanted - len(running), now_ns)
        return self._shrink(running, now_ns)

    @property
    def settled(self) -> bool:
        """Whether no fewer engines would suffice without requests: time alone changes nothing."""
        active = sum(engine.active or engine.deactivating for engine in self._engines.values())
        return active <= self._options.min

    def _grow(self, missing: int, now_ns: int) -> list[StartEngine | FleetChanged]:
        actions: list[StartEngine | FleetChanged] = []
        # An engine that has not ended yet is there at once.
        engines = sorted(self._engines.values(), key=lambda engine: not engine.deactivating)
        for engine in engines:
            if missing and (engine.deactivating or engine.state is EngineState.STANDBY):
                actions += self._activation.activate(engine.name, now_ns)
                actions.append(FleetChanged(engine.name, True, self.wanted, self.why))
                missing -= 1
        return actions

    def _shrink(self, running: Sequence[Engine], now_ns: int) -> list[StartEngine | FleetChanged]:
        """Deactivate engines with few requests, if fewer have sufficed for the idle time.

        None goes before that time after the last start, which may have been an operator's.
        """
        idle_ns = self._options.idle_s * 1e9
        if any(not engine.loaded or now_ns - engine.ready_ns < idle_ns for engine in running):
            return []
        actions: list[StartEngine | FleetChanged] = []
        surplus = len(running) - self._wanted[0][1]
        order = sorted(enumerate(running), key=lambda each: (each[1].load.unfinished, -each[0]))
        for _, engine in order:
            if surplus > 0 and self._activation.may_leave(engine):
                self._activation.deactivate(engine.name)
                why = f"fewer engines have sufficed for {self._options.idle_s:g} s"
                actions.append(FleetChanged(engine.name, False, self._wanted[0][1], why))
                surplus -= 1
        return actions

    # What is needed

    def _size(self, running: Sequence[Engine], now_ns: int) -> None:
        """Compute ``wanted`` and ``why``."""
        need = self._need()
        if self._goals is not None:
            self._goals.observe(need.requests, len(running), self._start_ns, now_ns)
        ahead = self._forecast(need, now_ns)
        found = [(self._options.min, "the fewest that are to run")]
        engines = math.ceil(ahead.memory / self._options.kv_share - 1e-9)
        found.append((engines, f"KV of requests is to fill {ahead.memory:.1f} engines"))
        for limit, what in self._request_limits():
            engines = math.ceil(ahead.requests / limit - 1e-9)
            found.append((engines, f"{ahead.requests:.0f} requests are expected, {what}"))
        most = len(self._engines) if self._options.max is None else self._options.max
        wanted, self.why = max(found, key=lambda each: each[0])
        self.wanted = min(wanted, most)
        while self._wanted and self._wanted[-1][1] <= self.wanted:
            self._wanted.pop()
        self._wanted.append((now_ns, self.wanted))
        while self._wanted[0][0] < now_ns - self._options.idle_s * 1e9:
            self._wanted.popleft()

    def _request_limits(self) -> Iterable[tuple[float, str]]:
        if self._options.requests is not None:
            yield self._options.requests, f"at most {self._options.requests} for each engine"
        if self._goals is not None and (limit := self._goals.per_engine) is not None:
            yield limit, f"and goals are met with up to {limit:.1f} for each engine"

    def _need(self) -> Need:
        """What all unfinished requests need now, waiting ones included."""
        known = [engine.kv_bytes for engine in self._engines.values() if engine.kv_bytes]
        usual = sum(known) / len(known) if known else 1.0
        memory, requests = 0.0, 0
        for engine in self._engines.values():
            # Not the engine's sums: they count a migrating request at its destination, too.
            filled = sum(engine.load.assigned[name].share for name in engine.calls)
            memory += filled / MILLION * (engine.kv_bytes or usual) / usual
            requests += sum(call.submitted.choices for call in engine.calls.values())
        for call in self._waiting():
            unassigned = UnassignedRequest(call.submitted, call.tokens, 0, 0)
            shares = [
                engine.load.share(unassigned) * (engine.kv_bytes or usual) / usual
                for engine in self._engines.values()
                if engine.places(call.service)
            ]
            memory += max(shares, default=0.0) / MILLION
            requests += call.submitted.choices
        return Need(memory, requests)

    def _forecast(self, need: Need, now_ns: int) -> Need:
        """The need when an engine that starts now would be ready, if its growth goes on.

        The growth is the median of those between parts of the time that a start takes, so that neither a
        single burst nor the noise of arrivals counts.
        """
        self._needs.append((now_ns, need))
        begin_ns = now_ns - self._start_ns
        if self._needs[0][0] > begin_ns:
            return need
        while self._needs[1][0] <= begin_ns:
            self._needs.popleft()
        parts: list[list[Need]] = [[] for _ in range(_PARTS)]
        for at_ns, each in self._needs:
            parts[min(_PARTS - 1, max(0, (at_ns - begin_ns) * _PARTS // self._start_ns))].append(each)
        means = [Need(*map(fmean, zip(*part, strict=True))) for part in parts if part]
        return Need(
            need.memory + _growth([each.memory for each in means]),
            need.requests + _growth([each.requests for each in means]),
        )

    def _learn_start(self, now_ns: int) -> None:
        """Measure how long the last engine took to get ready."""
        for engine in self._engines.values():
            key = engine.name, engine.incarnation
            if engine.state is EngineState.LOADING:
                self._started_ns.setdefault(key, now_ns)
            elif (began_ns := self._started_ns.pop(key, None)) is not None and engine.loaded:
                self._start_ns = max(1, engine.ready_ns - began_ns)


def _growth(means: Sequence[float]) -> float:
    """The expected growth over as long a time again."""
    if len(means) < _PARTS:
        return 0.0
    return _PARTS * max(0.0, median_low([after - before for before, after in pairwise(means)]))
