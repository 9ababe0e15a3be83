"""Admissions that forecast: memory is its peak, M*, for output lengths that they assume."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.forecast import COLD_STARTS, LengthDistribution, LengthHistory
from shoal.schedule.policies.admissions.base import (
    Admission,
    Numbers,
    known_tokens,
    leading,
    require,
    sum_with_each,
)
from shoal.schedule.policies.memory_forecast import MemoryForecast, most_tokens, peaks_with_each, total_peaks
from shoal.schedule.running_batch import IntArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasting(Admission):
    """What admissions have in common that assume certain output lengths: memory is their peak, M*."""

    def samples(self, requests: int) -> int:
        """How many lengths are drawn for each of so many requests; never more for more of them."""
        return 1

    @abstractmethod
    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """Output lengths of some requests [samples, n]; those of one do not depend on the others."""

    def combine(self, peaks: IntArray) -> Numbers:
        """One number of the peaks of all draws [..., draws], that does not fall when one of them rises."""
        return peaks[..., 0]

    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """The sum of every service's M*."""
        samples = self.samples(max(1, sum(map(len, forecasts))))
        lengths = [self.estimate(forecast.table, forecast.lengths, samples) for forecast in forecasts]
        return float(self.combine(total_peaks(forecasts, lengths)))

    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """The same with candidates."""
        before = len(running) + sum(map(len, others))
        samples = [self.samples(before + joined + 1) for joined in range(len(candidates))]
        most = samples[0]
        estimates = self.estimate(running.table.joined(candidates), running.lengths, most)
        peaks = peaks_with_each(running, candidates, estimates)
        if others:
            lengths = [self.estimate(other.table, other.lengths, most) for other in others]
            peaks = peaks + total_peaks(others, lengths)
        if samples[-1] == most:
            return self.combine(peaks)
        return np.array(
            [self.combine(some[:drawn]) for some, drawn in zip(peaks, samples, strict=True)], dtype=np.float64
        )

    def how_many_fit(
        self,
        running: MemoryForecast,
        candidates: RequestTable,
        others: Sequence[MemoryForecast],
        capacity: int,
    ) -> int:
        """See ``Admission``; a forecast is made only where sums leave the answer open."""
        limit = self.limit(capacity)
        if leading(sum_with_each(most_tokens, running, candidates, others) <= limit) == len(candidates):
            return len(candidates)
        possible = leading(sum_with_each(known_tokens, running, candidates, others) <= limit)
        if not possible:
            return 0
        if possible < len(candidates):
            candidates = candidates.take(np.arange(possible))
        return leading(self.demand_with_each(running, candidates, others) <= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFuture(Forecasting):
    """Output lengths drawn from those of the recent past; memory as their peak, M*."""

    reserved: float = 0.05
    """Share of the capacity kept back for forecasts that were too low."""
    window: int = 1000
    """How many finished requests of a service are remembered."""
    cold_start: str = "kaplan-meier"
    """"kaplan-meier" or "max": what is assumed before as many have finished (``LengthHistory``)."""
    draws: str = "mean"
    """"mean" of M* over 10 draws (fewer for more than 64 requests, at least 3), or "max" over
    min(5, 200 // requests + 1), as LightLLM does."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        require(0 <= self.reserved < 1, "reserved", "must be in [0, 1)", self.reserved)
        require(self.window >= 1, "window", "must be at least 1", self.window)
        require(
            self.cold_start in COLD_STARTS, "cold_start", f"can be {', '.join(COLD_STARTS)}", self.cold_start
        )
        require(self.draws in ("mean", "max"), "draws", "can be mean, max", self.draws)

    @property
    def reads_limits(self) -> bool:
        """As long as it has seen few answers."""
        return self.cold_start == "max"

    def limit(self, capacity: int) -> float:
        """The capacity without the reserve."""
        return (1 - self.reserved) * capacity

    def samples(self, requests: int) -> int:
        """Several; where many requests add up, each draw is nearer to the mean, and fewer will do."""
        if self.draws == "mean":
            return min(10, max(3, 640 // requests))
        return min(5, 200 // requests + 1)

    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """Drawn from those of the recent past, anew after every token."""
        generated = table.num_tokens_with_in_flight - table.num_prompt_tokens
        return lengths.draw(table.seeds, generated, table.max_new_tokens, samples)

    def combine(self, peaks: IntArray) -> Numbers:
        """Mean or largest."""
        combined: Numbers = peaks.mean(axis=-1) if self.draws == "mean" else peaks.max(axis=-1)
        return combined

    def new_history(self, maximum: int) -> LengthHistory:
        """A window as asked for."""
        return LengthHistory(maximum, self.window, self.cold_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(Forecasting):
    """The true output lengths (``Request.true_output_tokens``; the most where unknown), as M*."""

    def limit(self, capacity: int) -> float:
        """All of it."""
        return capacity

    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """The truth."""
        return (table.num_final_tokens - table.num_prompt_tokens)[None, :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted(Forecasting):
    """The output lengths that the scheduler's predictor says (``SchedulerOptions.lengths``), as M*.

    UELLM (section on its resource profiler): memory is set aside by a request's predicted length, and
    corrected when a request outgrows it.
    """

    reads_lengths: ClassVar[bool] = True

    reserved: float = 0.05
    """Share of the capacity kept back for predictions that were too low."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        require(0 <= self.reserved < 1, "reserved", "must be in [0, 1)", self.reserved)

    def limit(self, capacity: int) -> float:
        """The capacity without the reserve."""
        return (1 - self.reserved) * capacity

    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """The predictions."""
        return table.predicted_tokens[None, :]
