"""Past-future, oracle and predicted admission: forecast of the peak memory M* for assumed output lengths."""

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
    num_leading,
    require,
    sum_with_each,
)
from shoal.schedule.policies.memory_forecast import (
    MemoryForecast,
    max_stored_tokens,
    peaks_with_each,
    total_peaks,
)
from shoal.schedule.running_batch import IntArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasting(Admission):
    """Base of admissions that assume output lengths; their demand is the peak memory M*."""

    def samples(self, requests: int) -> int:
        """Number of draws for each of ``requests`` requests; does not increase with ``requests``."""
        return 1

    @abstractmethod
    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """Assumed output lengths [samples, n]; the rows of one request do not depend on other requests."""

    def combine(self, peaks: IntArray) -> Numbers:
        """Reduce the peaks of all draws [..., draws] to one number; monotone in each peak."""
        return peaks[..., 0]

    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """The sum of every service's M*."""
        samples = self.samples(max(1, sum(map(len, forecasts))))
        lengths = [self.estimate(forecast.table, forecast.lengths, samples) for forecast in forecasts]
        return float(self.combine(total_peaks(forecasts, lengths)))

    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """See ``Admission``."""
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
        """See ``Admission``; a forecast is made only if sums of tokens do not decide."""
        limit = self.limit(capacity)
        if num_leading(sum_with_each(max_stored_tokens, running, candidates, others) <= limit) == len(
            candidates
        ):
            return len(candidates)
        possible = num_leading(sum_with_each(known_tokens, running, candidates, others) <= limit)
        if not possible:
            return 0
        if possible < len(candidates):
            candidates = candidates.take(np.arange(possible))
        return num_leading(self.demand_with_each(running, candidates, others) <= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFuture(Forecasting):
    """Peak memory M* for output lengths drawn from those of recent requests."""

    reserved: float = 0.05
    """Share of the capacity reserved for forecasts that are too low."""
    window: int = 1000
    """Number of finished requests in the history of a service."""
    cold_start: str = "kaplan-meier"
    """"kaplan-meier" or "max": the assumption before as many have finished (``LengthHistory``)."""
    draws: str = "mean"
    """"mean" of M* over 10 draws (fewer for more than 64 requests, at least 3), or "max" over
    min(5, 200 // requests + 1), as LightLLM does."""

    def __post_init__(self) -> None:
        Admission.__post_init__(self)
        require(0 <= self.reserved < 1, "reserved", "must be in [0, 1)", self.reserved)
        require(self.window >= 1, "window", "must be at least 1", self.window)
        require(
            self.cold_start in COLD_STARTS, "cold_start", f"can be {', '.join(COLD_STARTS)}", self.cold_start
        )
        require(self.draws in ("mean", "max"), "draws", "can be mean, max", self.draws)

    @property
    def reads_limits(self) -> bool:
        """With a cold start at the maximum."""
        return self.cold_start == "max"

    def limit(self, capacity: int) -> float:
        return (1 - self.reserved) * capacity

    def samples(self, requests: int) -> int:
        """Fewer for many requests, whose sums vary less."""
        if self.draws == "mean":
            return min(10, max(3, 640 // requests))
        return min(5, 200 // requests + 1)

    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """Drawn from recent output lengths, again after every token."""
        generated = table.num_tokens_with_in_flight - table.num_prompt_tokens
        return lengths.draw(table.seeds, generated, table.max_new_tokens, samples)

    def combine(self, peaks: IntArray) -> Numbers:
        """The mean or the maximum."""
        combined: Numbers = peaks.mean(axis=-1) if self.draws == "mean" else peaks.max(axis=-1)
        return combined

    def new_history(self, maximum: int) -> LengthHistory:
        """A history of ``window`` requests."""
        return LengthHistory(maximum, self.window, self.cold_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(Forecasting):
    """Peak memory M* for the true output lengths (``Request.true_output_tokens``; the maximum if unknown)."""

    def limit(self, capacity: int) -> float:
        """The whole capacity."""
        return capacity

    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """The true lengths."""
        return (table.num_final_tokens - table.num_prompt_tokens)[None, :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted(Forecasting):
    """Peak memory M* for predicted output lengths (``SchedulerOptions.lengths``).

    UELLM (section on its resource profiler): memory is reserved by the predicted length of a request, and
    corrected when the request outgrows it.
    """

    reads_lengths: ClassVar[bool] = True

    reserved: float = 0.05
    """Share of the capacity reserved for predictions that are too low."""

    def __post_init__(self) -> None:
        Admission.__post_init__(self)
        require(0 <= self.reserved < 1, "reserved", "must be in [0, 1)", self.reserved)

    def limit(self, capacity: int) -> float:
        return (1 - self.reserved) * capacity

    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        return table.predicted_tokens[None, :]
