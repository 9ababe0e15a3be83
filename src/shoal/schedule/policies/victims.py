"""Victim policies: which running request is preempted when a running request needs a block and none is free.

The victim keeps its tokens and waits again; its KV is swapped out or computed again. The request admitted
longest ago is never a candidate, so at least one request is sure to finish (see ``Scheduler``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable

YOUNG = 0.8
"""``large-young`` prefers requests below this share of the mean output length."""


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """Input of a victim policy."""

    candidates: RequestTable
    """Longest admitted first; never empty."""
    forecasts: Mapping[str, MemoryForecast]
    """All running requests, by service; created on use."""
    capacity: int
    """Of the pool, in merged blocks."""
    keys: Callable[[], FloatArray]
    """Priorities of the candidates by the order, smaller first."""

    def sizes(self) -> FloatArray:
        """Merged blocks (fractions) that each candidate holds."""
        layouts = [self.forecasts[request.service].layout for request in self.candidates.requests]
        sizes: FloatArray = self.candidates.num_blocks / [layout.blocks_per_merged for layout in layouts]
        sizes *= [layout.units_per_block for layout in layouts]
        return sizes


class Victim(Protocol):
    def choose(self, pressure: MemoryPressure) -> RequestState:
        """One of the candidates; without side effects."""


class Newest:
    """The request admitted last (Past-Future scheduler, and vLLM's recomputation)."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        return pressure.candidates.requests[-1]


class LargeYoung:
    """The largest young request that was never preempted; if there is none, the newest.

    Young is below 0.8 of the mean output length in its service's history. Preempting it makes room for a long
    time, and loses few generated tokens.
    """

    def choose(self, pressure: MemoryPressure) -> RequestState:
        """Among equals the newest."""
        requests = pressure.candidates.requests
        sizes = pressure.sizes().tolist()
        young = [
            (size, request.seq_id, request)
            for size, generated, request in zip(
                sizes, pressure.candidates.num_generated.tolist(), requests, strict=True
            )
            if not request.num_preemptions and generated < YOUNG * self._mean(request, pressure)
        ]
        return max(young)[-1] if young else requests[-1]

    def _mean(self, request: RequestState, pressure: MemoryPressure) -> float:
        lengths = pressure.forecasts[request.service].lengths
        return float(lengths.mean_beyond(np.zeros(1, dtype=np.int64), np.array([request.max_new_tokens]))[0])


class SmallestThatFits:
    """The smallest request without which the mean forecast of M* fits; if there is none, the largest."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        """Among equals the newest."""
        requests = pressure.candidates.requests
        sizes = pressure.sizes().tolist()
        by_size = sorted(zip(sizes, requests, strict=True), key=lambda pair: (pair[0], -pair[1].seq_id))
        peaks = {name: _mean_peak(forecast) for name, forecast in pressure.forecasts.items()}
        total = sum(peaks.values())
        for _, request in by_size:
            forecast = pressure.forecasts[request.service]
            row = forecast.table.requests.index(request)
            rest = forecast.only(
                np.delete(np.arange(len(forecast)), row),
                None if forecast.shared is None else forecast.shared.without(row),
            )
            if total - peaks[request.service] + _mean_peak(rest) <= pressure.capacity:
                return request
        return by_size[-1][1]


class LowestPriority:
    """The least urgent request by the order; among equals the newest."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        keys = pressure.keys()
        return pressure.candidates.requests[len(keys) - 1 - int(keys[::-1].argmax())]


class FewestTokens:
    """The request with the fewest computed tokens, to recompute little; among equals the newest."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        computed = pressure.candidates.num_computed
        return pressure.candidates.requests[len(computed) - 1 - int(computed[::-1].argmin())]


def _mean_peak(forecast: MemoryForecast) -> int:
    """M* if every request has its expected output length, rounded up."""
    if not len(forecast):
        return 0
    table = forecast.table
    generated = table.num_tokens_with_in_flight - table.num_prompt_tokens
    mean = forecast.lengths.mean_beyond(generated, table.max_new_tokens)
    return int(forecast.timeline(np.ceil(mean).astype(np.int64)[None, :]).peak()[0])


VICTIMS: dict[str, type[Victim]] = {
    "newest": Newest,
    "large-young": LargeYoung,
    "smallest-that-fits": SmallestThatFits,
    "lowest-priority": LowestPriority,
    "fewest-tokens": FewestTokens,
}
