"""Admissions: is there memory for one more request?

One family over the question which output lengths to assume: the largest possible (conservative), none beyond
what is there (aggressive), those of the recent past (past-future), those that a length predictor gives each
request (predicted), the true ones (oracle), the next few tokens only (slice).
Memory is counted in merged blocks. Past-Future scheduler: Gong et al., sections 3.1 to 3.3.

No admission sees fragmentation: blocks that are free inside another service's merged blocks count as free,
and compaction makes them so.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shoal.core import ConfigError, lookup
from shoal.forecast import COLD_STARTS, LengthDistribution, LengthHistory
from shoal.schedule.memory_forecast import MemoryForecast, most_tokens, peaks_with_each, total_peaks
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable

Numbers = FloatArray | IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(ABC):
    """Decides from numbers alone; holds knobs, no state."""

    stays_rejected: ClassVar[bool] = False
    """Whom it rejects, it rejects again as long as those running only decode and nobody leaves."""
    reads_lengths: ClassVar[bool] = False
    """It looks at predicted lengths."""

    admit_every: int = 1
    """Admission is tried at every so many steps (and whenever nothing runs)."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        if self.admit_every < 1:
            raise ConfigError(f"admission admit_every must be at least 1 step, got {self.admit_every}")

    @property
    def slice_tokens(self) -> int | None:
        """Output tokens after which a request must be scheduled anew; None: it runs while memory lasts."""
        return None

    def how_many_fit(
        self,
        running: MemoryForecast,
        candidates: RequestTable,
        others: Sequence[MemoryForecast],
        capacity: int,
    ) -> int:
        """How many of ``candidates``, from the first on, fit in ``capacity`` merged blocks.

        running: requests of the candidates' service; the candidates share no blocks with them. others: those
        of the other services.
        """
        return leading(self.demand_with_each(running, candidates, others) <= self.limit(capacity))

    def fits(self, forecasts: Sequence[MemoryForecast], capacity: int) -> bool:
        """Whether requests (a forecast for each service) fit in ``capacity`` merged blocks."""
        return bool(self.demand(forecasts) <= self.limit(capacity))

    @abstractmethod
    def limit(self, capacity: int) -> float:
        """How many of ``capacity`` merged blocks may be asked for."""

    @abstractmethod
    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """Merged blocks assumed to be needed at once, from ``footprint`` up to ``most`` of the forecasts."""

    @abstractmethod
    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """The same with the first, the first two, ... of ``candidates`` [k]; see ``how_many_fit``."""

    def new_history(self, maximum: int) -> LengthHistory:
        """The memory of past output lengths to keep for a service whose longest output is ``maximum``."""
        return LengthHistory(maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservative(Admission):
    """Every request takes all it may, and none leaves before another: prompt + most output, summed up."""

    stays_rejected: ClassVar[bool] = True

    overcommit: float = 1.0
    """Share of the capacity that this sum may reach, 1.5 for 150%."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        _require(self.overcommit > 0, "overcommit", "must be above 0", self.overcommit)

    def limit(self, capacity: int) -> float:
        """The overcommitted capacity."""
        return self.overcommit * capacity

    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """The sum of what each may take."""
        return sum([forecast.most for forecast in forecasts])

    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """The same with candidates."""
        return _most_with_each(running, candidates, others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggressive(Admission):
    """No request grows: tokens held and the candidate's are all that counts."""

    stays_rejected: ClassVar[bool] = True

    watermark: float = 0.95
    """Share of the capacity that they may reach."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        _require(0 < self.watermark <= 1, "watermark", "must be in (0, 1]", self.watermark)

    def limit(self, capacity: int) -> float:
        """The capacity up to the watermark."""
        return self.watermark * capacity

    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """What is known already."""
        return sum([forecast.footprint for forecast in forecasts])

    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """The same with candidates."""
        return _footprint_with_each(running, candidates, others)


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
        peaks = peaks_with_each(
            running,
            self.estimate(running.table, running.lengths, most),
            candidates,
            self.estimate(candidates, running.lengths, most),
        )
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
        if leading(_most_with_each(running, candidates, others) <= limit) == len(candidates):
            return len(candidates)
        possible = leading(_footprint_with_each(running, candidates, others) <= limit)
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
        _require(0 <= self.reserved < 1, "reserved", "must be in [0, 1)", self.reserved)
        _require(self.window >= 1, "window", "must be at least 1", self.window)
        _require(
            self.cold_start in COLD_STARTS, "cold_start", f"can be {', '.join(COLD_STARTS)}", self.cold_start
        )
        _require(self.draws in ("mean", "max"), "draws", "can be mean, max", self.draws)

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
        _require(0 <= self.reserved < 1, "reserved", "must be in [0, 1)", self.reserved)

    def limit(self, capacity: int) -> float:
        """The capacity without the reserve."""
        return (1 - self.reserved) * capacity

    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """The predictions."""
        return table.predicted_tokens[None, :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Admission):
    """Every request owns the blocks of its next ``tokens`` output tokens, and is scheduled anew after them.

    SCLS on continuous batching: memory for a slice is reserved exactly, so that nobody is preempted inside
    one. At its end a request keeps its KV and waits for memory for the next; where nobody can go on, one is
    preempted.
    """

    tokens: int = 128

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        _require(self.tokens >= 1, "tokens", "must be at least 1", self.tokens)

    @property
    def slice_tokens(self) -> int:
        """The length of a slice."""
        return self.tokens

    def limit(self, capacity: int) -> float:
        """All of it."""
        return capacity

    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """What is known already; slices are allocated, so that the pool itself says what is left."""
        return sum([forecast.footprint for forecast in forecasts])

    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """The same with candidates."""
        return _footprint_with_each(running, candidates, others)


def leading(fits: npt.NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    first = int(fits.argmin())
    return len(fits) if fits[first] else first


def _most_with_each(
    running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
) -> IntArray:
    """Merged blocks if every output is as long as it may be, with each further candidate."""
    of_others = sum([other.most for other in others])
    return running.with_each(most_tokens(running.table), most_tokens(candidates)) + of_others


def _footprint_with_each(
    running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
) -> IntArray:
    """Merged blocks for all known tokens, with the first, the first two, ... candidates."""
    known = running.table.num_tokens_with_in_flight, candidates.num_tokens_with_in_flight
    return running.with_each(*known) + sum([other.footprint for other in others])


def _require(holds: bool, knob: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"admission {knob} {rule}, got {value!r}")


ADMISSIONS: Mapping[str, type[Admission]] = {
    "conservative": Conservative,
    "aggressive": Aggressive,
    "past-future": PastFuture,
    "predicted": Predicted,
    "slice": Slice,
    "oracle": Oracle,
}
"""Admissions by name."""


def admission_class(name: str) -> type[Admission]:
    """The admission called ``name``; raises ConfigError with the possible names."""
    return lookup("admission policy", ADMISSIONS, name)
