"""A simulated cluster whose placement (services per device group) changes while it serves."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core import FinishReason, Request
from shoal.execute.simulated import HOST_BYTES_PER_S
from shoal.measure import RequestRow
from shoal.place.placement import Group, Placement
from shoal.place.re_placement import Difference, difference
from shoal.schedule import RequestState
from shoal.simulate.migrations import aged
from shoal.simulate.placed_engines import PlacedEngines
from shoal.simulate.recorder import Recorder
from shoal.simulate.replica import Replica, VirtualClock
from shoal.simulate.simulation import row_of

_NO_SAMPLES_NS = 1 << 60


@dataclass(slots=True)
class _Engine:
    group: Group
    replica: Replica
    ready_ns: int
    """Start of its service."""
    requests: dict[str, Request] = field(default_factory=dict)
    """Its requests as submitted, in order."""


class ChangingCluster:
    """The engines of a placement, one per group; a request goes to the least busy engine of its service
    (SeaLLM).

    A change keeps the engines of unchanged groups. The others end: their requests resume on other engines,
    which recompute their KV. New engines serve once the missing weights are copied from the host, which has
    all weights (load_bytes_per_s: per device). Requests of a service without an engine wait.
    """

    def __init__(
        self,
        engines: PlacedEngines,
        placement: Placement,
        requests: Sequence[Request],
        load_bytes_per_s: float = HOST_BYTES_PER_S,
    ) -> None:
        self.placement = placement
        self.rows: list[RequestRow] = []
        """Finished requests, in order."""
        self.services: Sequence[str] = tuple(engines.services)
        self.execution_s = {name: each.execution_s for name, each in engines.services.items()}
        """L^ by service."""
        self._placed_engines = engines
        self._load_bytes_per_s = load_bytes_per_s
        self._clock = VirtualClock()
        self._arrivals = sorted(requests, key=lambda request: request.arrival_ns)
        self._next = 0
        self._waiting: list[Request] = []
        self._number = 0
        self._engines: dict[int, _Engine] = {}
        self._due: list[tuple[int, int]] = []
        for group in placement.groups:
            self._start(group, 0)

    @property
    def now_s(self) -> float:
        """The time."""
        return self._clock.now_ns / 1e9

    def run(self, until_s: float | None = None) -> None:
        """Serve until a time; None: until all requests have ended."""
        until_ns = None if until_s is None else round(until_s * 1e9)
        while (now_ns := self._next_ns()) is not None and (until_ns is None or now_ns <= until_ns):
            self._clock.now_ns = now_ns
            self._run_moment(now_ns)
        if until_ns is not None:
            self._clock.now_ns = until_ns

    def change(self, placement: Placement) -> Difference:
        """Change the placement now, on the devices where that loads least."""
        now_ns = self._clock.now_ns
        change = difference(self.placement, placement, self._placed_engines.memory)
        unchanged = {_names(group) for group in change.kept}
        displaced: list[Request] = []
        for number, engine in list(self._engines.items()):
            if _names(engine.group) not in unchanged:
                displaced += _detach_all(engine)
                del self._engines[number]
        for group in change.after.groups:
            if group.shares and _names(group) not in unchanged:
                self._start(group, now_ns + self._load_ns(group, change))
        self.placement = change.after
        self._waiting = [*displaced, *self._waiting]
        self._dispatch_waiting()
        return change

    def _start(self, group: Group, ready_ns: int) -> None:
        if not group.shares:
            return
        number = self._number
        self._number += 1
        [spec] = self._placed_engines.engines(group.shape)
        recorder = Recorder(number, spec.layout.merged_blocks, _NO_SAMPLES_NS, spans=False)

        def ended(state: RequestState, reason: FinishReason, now_ns: int) -> None:
            self.rows.append(row_of(state, reason, now_ns, number))
            self._engines[number].requests.pop(state.request.id, None)

        replica = Replica(spec, self._clock, recorder, ended, skip_ahead=True)
        self._engines[number] = _Engine(group, replica, ready_ns)
        if ready_ns > self._clock.now_ns:
            heapq.heappush(self._due, (ready_ns, number))

    def _load_ns(self, group: Group, change: Difference) -> int:
        new = change.loads.get(_names(group), ())
        services = self._placed_engines.memory.services
        each = sum(services[name].model.weight_bytes(group.tp) for name in new)
        return round(each / self._load_bytes_per_s * 1e9)

    def _next_ns(self) -> int | None:
        due = self._due
        while due and not self._is_due(*due[0]):
            heapq.heappop(due)
        times = [due[0][0]] if due else []
        if self._next < len(self._arrivals):
            times.append(self._arrivals[self._next].arrival_ns)
        return min(times, default=None)

    def _is_due(self, time_ns: int, number: int) -> bool:
        engine = self._engines.get(number)
        return engine is not None and time_ns in (engine.replica.due_ns, engine.ready_ns)

    def _run_moment(self, now_ns: int) -> None:
        touched = set()
        while self._due and self._due[0][0] == now_ns:
            number = heapq.heappop(self._due)[1]
            engine = self._engines.get(number)
            if engine is not None:
                touched.add(number)
                if engine.replica.due_ns == now_ns:
                    engine.replica.resume()
        while self._next < len(self._arrivals) and self._arrivals[self._next].arrival_ns <= now_ns:
            self._waiting.append(self._arrivals[self._next])
            self._next += 1
        self._dispatch_waiting()
        for number in sorted(touched):
            self._begin(number)

    def _dispatch_waiting(self) -> None:
        """Dispatch waiting requests to engines that serve."""
        now_ns = self._clock.now_ns
        left, touched = [], set()
        for request in self._waiting:
            able = [
                number
                for number, engine in self._engines.items()
                if engine.ready_ns <= now_ns and request.service in engine.group.services
            ]
            if not able:
                left.append(request)
                continue
            number = min(able, key=lambda number: len(self._engines[number].requests))
            engine = self._engines[number]
            engine.requests[request.id] = request
            engine.replica.submit(aged(request, now_ns))
            touched.add(number)
        self._waiting = left
        for number in sorted(touched):
            self._begin(number)

    def _begin(self, number: int) -> None:
        replica = self._engines[number].replica
        replica.begin()
        if replica.due_ns is not None:
            heapq.heappush(self._due, (replica.due_ns, number))


def _detach_all(engine: _Engine) -> list[Request]:
    """All requests of an ending engine, to be resumed on other engines."""
    detached = {request.id: request for request in engine.replica.abandon(list(engine.requests))}
    # A request whose last token is due cannot be detached; it starts again as submitted.
    return [detached.get(name, request) for name, request in engine.requests.items()]


def _names(group: Group) -> tuple[str, ...]:
    return tuple(sorted(device.name for device in group.devices))
