"""Victims: which running request is preempted when another needs a block and none is free.

The victim's tokens stay; it waits again, and its KV is computed again or was saved. The scheduler never
offers the request that was admitted longest ago, so every choice leaves somebody who is sure to finish
(see ``Scheduler``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable

YOUNG = 0.8
"""``large-young`` takes requests below this share of the mean output length."""


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """What a victim policy sees."""

    candidates: RequestTable
    """Whom it may choose, longest admitted first; never empty."""
    forecasts: Mapping[str, MemoryForecast]
    """All running requests, by service; made when asked for."""
    capacity: int
    """Of the pool, in merged blocks."""
    keys: Callable[[], FloatArray]
    """How urgent the order finds each candidate, smaller first."""

    def sizes(self) -> FloatArray:
        """Merged blocks that each candidate holds, in fractions."""
        layouts = [self.forecasts[request.service].layout for request in self.candidates.requests]
        sizes: FloatArray = self.candidates.num_blocks / [layout.blocks_per_merged for layout in layouts]
        sizes *= [layout.units_per_block for layout in layouts]
        return sizes


class Victim(Protocol):
    """Chooses who is preempted."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        """One of the candidates; has no effects."""


class Newest:
    """The one admitted last (Past-Future scheduler, and vLLM's recomputation)."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        """The last candidate."""
        return pressure.candidates.requests[-1]


class LargeYoung:
    """The largest holder that is still young and was never preempted; where there is none, the newest.

    Young is below 0.8 of the mean output length that its service's history gives. One preemption then makes
    room for long, and what it cost in generated tokens is little.
    """

    def choose(self, pressure: MemoryPressure) -> RequestState:
        """The largest that qualifies; of equals the newest."""
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
    """The smallest holder without which the mean forecast of M* fits; where there is none, the largest."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        """The first by size; of equals the newest."""
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
    """The one that the order would serve last; of equals the newest."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        """The largest key."""
        keys = pressure.keys()
        return pressure.candidates.requests[len(keys) - 1 - int(keys[::-1].argmax())]


class FewestTokens:
    """The one with the fewest tokens, so that least is computed again; of equals the newest."""

    def choose(self, pressure: MemoryPressure) -> RequestState:
        """The fewest computed tokens."""
        computed = pressure.candidates.num_computed
        return pressure.candidates.requests[len(computed) - 1 - int(computed[::-1].argmin())]


def _mean_peak(forecast: MemoryForecast) -> int:
    """M* if every request has the mean length that its past lets expect, rounded up."""
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
"""Victim policies by name."""
