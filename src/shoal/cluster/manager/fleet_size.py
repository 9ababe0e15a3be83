"""Size of the fleet: how many engines requests need, and which go to standby or come back.

Mell's Algorithm 1 activates a GPU where requests find no room, and terminates one without requests. Here a
forecast decides, for any dispatch: of KV memory, of requests, and of goals.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.manager.actions import FleetChanged, StartEngine
from shoal.cluster.manager.activation import Activation
from shoal.cluster.manager.fleet_need import FleetNeed
from shoal.cluster.manager.goal_limit import GoalLimit
from shoal.cluster.manager.state import Engine, ManagedCall
from shoal.cluster.status import EngineState

_FIRST_START_NS = 10_000_000_000
"""Assumed time of a start before one was seen."""


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
        self._need = FleetNeed(engines, waiting)
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
        running = [engine for engine in self._engines.values() if _runs_on(engine)]
        self._size(running, now_ns)
        missing = self._missing(running)
        if missing:
            self.wanted = max(self.wanted, len(running) + len(missing))
        self._remember(now_ns)
        if missing:
            return self._grow(missing, now_ns)
        return self._shrink(running, now_ns)

    @property
    def settled(self) -> bool:
        """Whether no fewer engines would suffice without requests: time alone changes nothing."""
        active = sum(engine.active or engine.deactivating for engine in self._engines.values())
        return active <= self._options.min

    def _grow(self, missing: Mapping[str, str], now_ns: int) -> list[StartEngine | FleetChanged]:
        actions: list[StartEngine | FleetChanged] = []
        for name, why in missing.items():
            actions += self._activation.activate(name, now_ns)
            actions.append(FleetChanged(name, True, self.wanted, why))
        return actions

    def _shrink(self, running: Sequence[Engine], now_ns: int) -> list[StartEngine | FleetChanged]:
        """Deactivate engines with few requests, if fewer have sufficed for the idle time.

        None goes before that time after the last start, which may have been an operator's, nor while an
        engine that is to run does not.
        """
        idle_ns = self._options.idle_s * 1e9
        active = [engine for engine in self._engines.values() if engine.active]
        if any(not engine.accepts_requests or now_ns - engine.ready_ns < idle_ns for engine in active):
            return []
        actions: list[StartEngine | FleetChanged] = []
        surplus = len(running) - self._wanted[0][1]
        order = sorted(enumerate(running), key=lambda each: (each[1].load.unfinished, -each[0]))
        for _, engine in order:
            if surplus > 0 and self._activation.may_leave(engine) and self._is_spare(engine):
                self._activation.deactivate(engine.name)
                why = f"fewer engines have sufficed for {self._options.idle_s:g} s"
                actions.append(FleetChanged(engine.name, False, self._wanted[0][1], why))
                surplus -= 1
        return actions

    # What is needed

    def _missing(self, running: Sequence[Engine]) -> dict[str, str]:
        """Engines to activate, and why: those of services that have too few, then any.

        A service without any engine gets one beyond ``FleetOptions.max``, too.
        """
        # An engine that has not ended yet is there at once.
        dormant = sorted(
            (
                engine
                for engine in self._engines.values()
                if engine.residences
                and not _runs_on(engine)
                and (engine.deactivating or engine.state is EngineState.STANDBY)
            ),
            key=lambda engine: not engine.deactivating,
        )
        missing: dict[str, str] = {}
        for service in {name: None for engine in dormant for name in engine.residences}:
            own = [engine for engine in running if engine.places(service)]
            short = self._needed_for(service, own) - len(own)
            if own:
                short = min(short, self._most - len(running) - len(missing))
            short -= sum(self._engines[name].places(service) for name in missing)
            for engine in dormant:
                if short > 0 and engine.places(service) and engine.name not in missing:
                    short_too = len(running) + len(missing) < self.wanted
                    missing[engine.name] = (
                        self.why if short_too else f"requests of {service} need another engine"
                    )
                    short -= 1
        for call in self._waiting():
            self._add_large(call, running, dormant, missing)
        for engine in dormant:
            if len(running) + len(missing) < self.wanted and engine.name not in missing:
                missing[engine.name] = self.why
        return missing

    def _add_large(
        self,
        call: ManagedCall,
        running: Sequence[Engine],
        dormant: Sequence[Engine],
        missing: dict[str, str],
    ) -> None:
        """Add an engine that holds a waiting request which no running one does."""
        awaited = [*running, *(self._engines[name] for name in missing)]
        if any(engine.places(call.service) and engine.has_room(call.submitted) for engine in awaited):
            return
        for engine in dormant:
            if engine.places(call.service) and engine.has_room(call.submitted):
                missing[engine.name] = (
                    f"a request of {call.service} needs {call.submitted.longest} tokens of KV"
                )
                return

    def _needed_for(self, service: str, engines: Sequence[Engine]) -> int:
        """How many engines all requests of a service's engines need, and its waiting ones."""
        need = self._need.of(engines, service)
        least = 1 if need.requests else 0
        found = [
            need.memory / self._options.kv_share,
            *(need.requests / limit for limit, _ in self._request_limits()),
        ]
        return max(least, *(math.ceil(each - 1e-9) for each in found))

    def _is_spare(self, engine: Engine) -> bool:
        """Whether the other running engines of each of its services are enough."""
        for service in engine.residences:
            if engine.places(service):
                own = [each for each in self._engines.values() if _runs_on(each) and each.places(service)]
                if self._needed_for(service, own) >= len(own):
                    return False
        return True

    @property
    def _most(self) -> int:
        return len(self._engines) if self._options.max is None else self._options.max

    def _size(self, running: Sequence[Engine], now_ns: int) -> None:
        """Compute ``wanted`` and ``why``, whatever the services are."""
        self._need.measure()
        need = self._need.of(self._engines.values())
        if self._goals is not None:
            ready = sum(engine.accepts_requests for engine in running)
            self._goals.observe(need.requests, ready, self._start_ns, now_ns)
        ahead = self._need.ahead(need, self._start_ns, now_ns)
        found = [(self._options.min, "the fewest that are to run")]
        engines = math.ceil(ahead.memory / self._options.kv_share - 1e-9)
        found.append((engines, f"KV of requests is to fill {ahead.memory:.1f} engines"))
        for limit, what in self._request_limits():
            engines = math.ceil(ahead.requests / limit - 1e-9)
            found.append((engines, f"{ahead.requests:.0f} requests are expected, {what}"))
        wanted, self.why = max(found, key=lambda each: each[0])
        self.wanted = min(wanted, self._most)

    def _remember(self, now_ns: int) -> None:
        """Add ``wanted`` to those of the idle time."""
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

    def _learn_start(self, now_ns: int) -> None:
        """Measure how long the last engine took to get ready."""
        present = {(engine.name, engine.incarnation) for engine in self._engines.values()}
        self._started_ns = {key: at_ns for key, at_ns in self._started_ns.items() if key in present}
        for engine in self._engines.values():
            key = engine.name, engine.incarnation
            if engine.state is EngineState.LOADING:
                self._started_ns.setdefault(key, now_ns)
            elif (began_ns := self._started_ns.pop(key, None)) is not None and engine.loaded:
                self._start_ns = max(1, engine.ready_ns - began_ns)


def _runs_on(engine: Engine) -> bool:
    """Whether an engine takes requests, or is about to: it loads, or was activated while it ended."""
    if engine.state not in (EngineState.READY, EngineState.LOADING):
        return False
    return not engine.killed or engine.stopping
