"""Analytic estimates of device groups: queueing formulas in place of a simulation, in microseconds.

A group computes the steps of its services in turn. With n_s requests of service s running and q_s the
probability that there are any, a token of s takes its own step and those of the other running services,
stretched by the share of time spent on prompts; Little's law gives the number of running requests. Waiting in
bursts and the spread of latencies are rough. This suffices to select placements for a simulation.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shoal.forecast import StepRows
from shoal.place.estimate import ServiceEstimate
from shoal.place.fetch_waits import WeightsLoad, fetch_waits_s
from shoal.place.memory import MemoryCheck
from shoal.place.placement import GroupShape
from shoal.place.traffic import ServiceLoad, StepTimesOf

_ROUNDS, _SETTLED = 24, 1e-6
"""Iterations at most, and the relative change of latencies at which they end."""
_LARGEST_BATCH = 256.0
_FAR = 64
"""Decode step times are interpolated linearly between 1 row and this many."""
_BUSIEST = 0.98
_INSTANT_S = 1e-6
_LATER = 0.35
"""Share of the steps of longer services that a service waits for, as orders prefer short requests."""


@dataclass(frozen=True, slots=True)
class _Speed:
    prefill_s: float
    step_s: float
    row_s: float


@dataclass(slots=True)
class _Part:
    """A service in a group, during the iteration."""

    load: ServiceLoad
    requests: float
    window_s: float
    speed: _Speed
    most: float
    """Limit on concurrently running requests."""
    running: float = 0.0
    latency_s: float = 0.0


@dataclass(slots=True)
class AnalyticGroups:
    """An analytic ``GroupModel``."""

    loads: Mapping[str, ServiceLoad]
    times: StepTimesOf
    memory: MemoryCheck
    fetch_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rate at which weights come to a device, by kind; needed where ``memory`` has a limit on weights."""
    short_first: bool = True
    """Whether services with short requests go first, as in the orders of SeaLLM and ours."""
    max_running: int | None = None
    """Limit on the running requests of a group; None: the memory alone."""
    _speeds: dict[tuple[str, str, int], _Speed] = field(default_factory=dict)

    @property
    def requests(self) -> Mapping[str, int]:
        return {name: load.requests for name, load in self.loads.items()}

    def serve(self, shapes: Sequence[GroupShape]) -> list[Mapping[str, ServiceEstimate]]:
        return [self._group(shape) for shape in shapes]

    def _group(self, shape: GroupShape) -> Mapping[str, ServiceEstimate]:
        loads = [self.loads[name] for name in shape.services]
        parts = [
            _Part(
                load,
                load.requests * share,
                load.requests / load.rate_per_s,
                self._speed(name, shape.kind, shape.tp),
                most,
            )
            for load, (name, share), most in zip(loads, shape.shares, self._most_running(shape), strict=True)
        ]
        for _ in range(_ROUNDS):
            if _settle(parts, _LATER if self.short_first else 1.0) < _SETTLED:
                break
        waits_s = self._fetch_waits_s(shape, parts)
        return {
            name: _estimate(part.load, part.requests, part.latency_s + waits_s.get(name, 0.0))
            for name, part in zip(shape.services, parts, strict=True)
        }

    def _fetch_waits_s(self, shape: GroupShape, parts: Sequence[_Part]) -> dict[str, float]:
        """Mean wait for weights by service; empty if all of them stay."""
        services = self.memory.services
        limit = self.memory.limit_bytes(shape.services, shape.tp)
        if limit is None:
            return {}
        rates: dict[str, float] = defaultdict(float)
        for name, part in zip(shape.services, parts, strict=True):
            rates[services[name].weights_name] += part.requests / part.window_s
        pinned = {services[name].weights_name for name in shape.services if services[name].pinned}
        sizes = self.memory.weight_bytes(shape.services, shape.tp)
        loads = [WeightsLoad(size, rates[name], name in pinned) for name, size in sizes.items()]
        waits_s = dict(
            zip(sizes, fetch_waits_s(loads, limit, self.fetch_bytes_per_s[shape.kind]), strict=True)
        )
        return {name: waits_s[services[name].weights_name] for name in shape.services}

    def _most_running(self, shape: GroupShape) -> list[float]:
        """Requests of each service that fit in an equal part of the KV memory, and in its part of the limit.

        That part is its part of the group's output tokens.
        """
        services = shape.services
        left = self.memory.left_bytes(services, shape.memory_bytes, shape.tp) / len(services)
        most = []
        tokens_of = {
            name: self.loads[name].requests * share * self.loads[name].output_tokens
            for name, share in shape.shares
        }
        limit = math.inf if self.max_running is None else self.max_running / max(1.0, sum(tokens_of.values()))
        for name in services:
            load, model = self.loads[name], self.memory.services[name].model
            tokens = load.prompt_tokens + load.output_tokens / 2
            fitting = left / (tokens * model.kv_bytes_per_token(shape.tp))
            most.append(max(1.0, min(_LARGEST_BATCH, fitting, limit * max(1.0, tokens_of[name]))))
        return most

    def _speed(self, name: str, kind: str, tp: int) -> _Speed:
        found = self._speeds.get((name, kind, tp))
        if found is None:
            load, times = self.loads[name], self.times(name, kind, tp)
            context = max(1, round(load.prompt_tokens + load.output_tokens / 2))
            one = times.step_time(StepRows(1, context, (), 1))
            many = times.step_time(StepRows(_FAR, _FAR * context, (), _FAR))
            row_s = max(0.0, (many - one) / (_FAR - 1))
            prefill_s = times.step_time(StepRows(0, 0, ((max(2, round(load.prompt_tokens)), 0),), 1))
            found = self._speeds[name, kind, tp] = _Speed(prefill_s, one - row_s, row_s)
        return found


def _settle(parts: Sequence[_Part], later: float) -> float:
    """One iteration: running requests follow from latencies, and latencies from running requests.

    Returns the largest relative change of a latency. Requests of a window are in the group for the window
    plus a latency, so an overload ends late. later: as ``_LATER``.
    """
    prompts_s = sum(part.requests * part.speed.prefill_s for part in parts)
    duration_s = max(_INSTANT_S, *(part.window_s + part.latency_s for part in parts))
    busy = min(_BUSIEST, prompts_s / duration_s)
    steps = [part.speed.step_s + part.speed.row_s * part.running for part in parts]
    taken = [step_s * (1 - math.exp(-part.running)) for step_s, part in zip(steps, parts, strict=True)]
    waits_s = _waits_for_others(parts, taken, later)
    change = 0.0
    for at, part in enumerate(parts):
        token_s = (steps[at] + waits_s[at]) / (1 - busy)
        decode_s = part.load.output_tokens * token_s
        wanted = part.requests * decode_s / max(_INSTANT_S, part.window_s + part.latency_s)
        part.running = min(part.most, wanted)
        late_s = max(prompts_s, part.requests * decode_s / part.most) - part.window_s
        bursts = (1 + part.load.arrival_cv**2) / 2
        prefill_s = part.speed.prefill_s / (1 - busy)
        latency_s = bursts * busy * prefill_s + max(0.0, late_s) / 2 + prefill_s + decode_s - token_s
        change = max(change, abs(latency_s - part.latency_s) / latency_s)
        part.latency_s = latency_s
    return change


def _waits_for_others(parts: Sequence[_Part], taken: Sequence[float], later: float) -> list[float]:
    """For each service the time that a token waits for steps of the others: all of shorter services.

    taken: mean time of the present step of each service. later: share of the others.
    """
    waits_s = [0.0] * len(parts)
    total_s, shorter_s = sum(taken), 0.0
    order = sorted(range(len(parts)), key=lambda at: parts[at].load.execution_s)
    for _, same in groupby(order, key=lambda at: parts[at].load.execution_s):
        equal = list(same)
        for at in equal:
            waits_s[at] = shorter_s + later * (total_s - shorter_s - taken[at])
        shorter_s += sum(taken[at] for at in equal)
    return waits_s


def _estimate(load: ServiceLoad, requests: float, latency_s: float) -> ServiceEstimate:
    """For exponentially distributed latencies; misses are rounded to whole requests."""
    missed = float(round(requests * math.exp(-load.goal_s / latency_s)))
    return ServiceEstimate(requests, min(requests, missed), requests, requests * latency_s / load.execution_s)
