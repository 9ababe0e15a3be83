"""What the requests of a cluster need of its engines: KV memory and places, now and soon."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median_low
from typing import NamedTuple

from shoal.cluster.manager.engine_load import MILLION, UnassignedRequest
from shoal.cluster.manager.state import Engine, ManagedCall

_PARTS = 5
"""Parts of the time that a start takes, between which growth is measured."""


class Need(NamedTuple):
    """What unfinished requests need."""

    memory: float
    """KV at their end, in engines of usual size."""
    requests: float
    """Their number, each choice counted."""


class FleetNeed:
    """Measures the need of unfinished requests, and forecasts it.

    engines: all, by name. waiting: gives the requests without an engine.
    """

    def __init__(self, engines: Mapping[str, Engine], waiting: Callable[[], Iterable[ManagedCall]]) -> None:
        self._engines = engines
        self._waiting = waiting
        self._of_engines: dict[str, Need] = {}
        self._of_waiting: dict[str, Need] = {}
        """As last measured: of the requests of each engine, and of the waiting ones of each service."""
        self._needs: deque[tuple[int, Need]] = deque()

    def of(self, engines: Iterable[Engine], service: str | None = None) -> Need:
        """What unfinished requests of some engines need now, and waiting ones of a service (None: of all)."""
        parts = [self._of_engines[engine.name] for engine in engines]
        parts += [own for name, own in self._of_waiting.items() if service in (None, name)]
        return Need(math.fsum(part.memory for part in parts), sum(part.requests for part in parts))

    def measure(self) -> None:
        """Sum up what the requests of each engine need, and the waiting ones of each service."""
        engines = self._engines.values()
        known = [engine.kv_bytes for engine in engines if engine.kv_bytes]
        usual = sum(known) / len(known) if known else 1.0
        size = {engine.name: (engine.kv_bytes or usual) / usual / MILLION for engine in engines}
        self._of_engines = {}
        for engine in engines:
            # Not the engine's sums: they count a migrating request at its destination, too.
            filled = sum(engine.load.assigned[name].share for name in engine.calls)
            requests = sum(call.submitted.choices for call in engine.calls.values())
            self._of_engines[engine.name] = Need(filled * size[engine.name], requests)
        self._of_waiting = {}
        for call in self._waiting():
            unassigned = UnassignedRequest(call.submitted, call.tokens, 0, 0)
            shares = [
                engine.load.share(unassigned) * size[engine.name]
                for engine in engines
                if engine.places(call.service)
            ]
            before = self._of_waiting.get(call.service, Need(0.0, 0))
            self._of_waiting[call.service] = Need(
                before.memory + max(shares, default=0.0), before.requests + call.submitted.choices
            )

    def ahead(self, need: Need, start_ns: int, now_ns: int) -> Need:
        """The need in ``start_ns``, when an engine that starts now would be ready, if its growth goes on.

        The growth is the median of those between parts of the time that a start takes, so that neither a
        single burst nor the noise of arrivals counts.
        """
        self._needs.append((now_ns, need))
        begin_ns = now_ns - start_ns
        if self._needs[0][0] > begin_ns:
            return need
        while self._needs[1][0] <= begin_ns:
            self._needs.popleft()
        parts: list[list[Need]] = [[] for _ in range(_PARTS)]
        for at_ns, each in self._needs:
            parts[min(_PARTS - 1, max(0, (at_ns - begin_ns) * _PARTS // start_ns))].append(each)
        means = [Need(*map(fmean, zip(*part, strict=True))) for part in parts if part]
        return Need(
            need.memory + _growth([each.memory for each in means]),
            need.requests + _growth([each.requests for each in means]),
        )


def _growth(means: Sequence[float]) -> float:
    """The expected growth over as long a time again."""
    if len(means) < _PARTS:
        return 0.0
    return _PARTS * max(0.0, median_low([after - before for before, after in pairwise(means)]))
