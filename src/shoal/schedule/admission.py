"""Admissions: is there memory for one more request?

One family over the question "which output lengths do I believe": the largest possible (conservative),
none beyond what is there (aggressive), those of the recent past (past-future), those that a length predictor
gives each request (predicted), the true ones (oracle), the next few tokens only (slice).
Memory is counted in merged blocks. Past-Future scheduler: Gong et al., sections 3.1 to 3.3.

No admission sees fragmentation: blocks that are free inside another service's merged blocks count as free,
and compaction makes them so.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.core import ConfigError, lookup
from shoal.forecast import COLD_STARTS, LengthHistory, safe_peak
from shoal.schedule.belief import PREDICTIONS, TRUTHS, Belief, draws
from shoal.schedule.crowd import Crowd


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(ABC):
    """Decides from numbers alone; holds knobs, no state.

    admit_every: admission is tried at every so many steps (and whenever nothing runs).
    stays_refused: whom it refuses, it refuses again as long as those running only decode and nobody leaves.
    reads_lengths: it looks at predicted lengths.
    """

    stays_refused: ClassVar[bool] = False
    reads_lengths: ClassVar[bool] = False

    admit_every: int = 1

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        if self.admit_every < 1:
            raise ConfigError(f"admission admit_every must be at least 1 step, got {self.admit_every}")

    @property
    def slice_tokens(self) -> int | None:
        """Output tokens after which a request must be scheduled anew; None: it runs while memory lasts."""
        return None

    def fits(self, crowds: Sequence[Crowd], capacity: int) -> bool:
        """Whether the requests in ``crowds`` (one of each service) fit in ``capacity`` merged blocks."""
        return self.demand(crowds) <= self.limit(capacity)

    @abstractmethod
    def limit(self, capacity: int) -> float:
        """How many of ``capacity`` merged blocks may be asked for."""

    @abstractmethod
    def demand(self, crowds: Sequence[Crowd]) -> float:
        """Merged blocks believed to be needed at once, from ``footprint`` up to ``most`` of the crowds."""

    def new_history(self, maximum: int) -> LengthHistory:
        """The memory of past output lengths to keep for a service whose longest output is ``maximum``."""
        return LengthHistory(maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservative(Admission):
    """Every request takes its ceiling, and none leaves before another: prompt + most output, summed up.

    overcommit: share of the capacity that this sum may reach, 1.5 for 150%.
    """

    stays_refused: ClassVar[bool] = True

    overcommit: float = 1.0

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        _require(self.overcommit > 0, "overcommit", "must be above 0", self.overcommit)

    def limit(self, capacity: int) -> float:
        """The overcommitted capacity."""
        return self.overcommit * capacity

    def demand(self, crowds: Sequence[Crowd]) -> float:
        """The sum of ceilings."""
        return sum([crowd.most for crowd in crowds])


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggressive(Admission):
    """No request grows: tokens held and the newcomer's are all that counts.

    watermark: share of the capacity that they may reach.
    """

    stays_refused: ClassVar[bool] = True

    watermark: float = 0.95

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        _require(0 < self.watermark <= 1, "watermark", "must be in (0, 1]", self.watermark)

    def limit(self, capacity: int) -> float:
        """The capacity up to the watermark."""
        return self.watermark * capacity

    def demand(self, crowds: Sequence[Crowd]) -> float:
        """What is known already."""
        return sum([crowd.footprint for crowd in crowds])


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasting(Admission):
    """What admissions have in common that believe in certain output lengths: memory is their peak, M*."""

    @abstractmethod
    def belief(self, crowds: Sequence[Crowd]) -> Belief:
        """In which lengths."""

    def combine(self, peaks: Sequence[int]) -> float:
        """One number of the peaks of all draws, that does not fall when one of them rises."""
        return peaks[0]

    def demand(self, crowds: Sequence[Crowd]) -> float:
        """The safe M* of all services."""
        belief = self.belief(crowds)
        return self._safe(crowds, [crowd.peak(belief) for crowd in crowds])

    def fits(self, crowds: Sequence[Crowd], capacity: int) -> bool:
        """See ``Admission``; bounds come first, since most answers need no forecast then."""
        limit, belief = self.limit(capacity), self.belief(crowds)
        known = [peak for crowd in crowds if (peak := crowd.known_peak(belief)) is not None]
        if len(known) == len(crowds):
            return self._safe(crowds, known) <= limit
        # No belief takes less than what is known already, or more than what everybody could take.
        footprint = most = 0
        for crowd in crowds:
            footprint += crowd.footprint
            most += crowd.most
        if footprint > limit:
            return False
        if most <= limit:
            return True
        glimpses = [seen for crowd in crowds if (seen := crowd.glimpse(belief)) is not None]
        if len(glimpses) == len(crowds) and self._safe(crowds, glimpses) > limit:
            return False
        bounds = [crowd.bounds(belief) for crowd in crowds]
        if self._safe(crowds, [high for _, high in bounds]) <= limit:
            return True
        if all(low is high for low, high in bounds) or self._safe(crowds, [low for low, _ in bounds]) > limit:
            return False
        return self.demand(crowds) <= limit

    def _safe(self, crowds: Sequence[Crowd], blocks: Sequence[Sequence[int]]) -> float:
        """One number of the peaks of each crowd."""
        if len(crowds) == 1:
            return self.combine([*map(crowds[0].merged, blocks[0])])
        peaks = [np.array([*map(crowd.merged, some)]) for crowd, some in zip(crowds, blocks, strict=True)]
        return self.combine(safe_peak(peaks).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class PastFuture(Forecasting):
    """Output lengths drawn from those of the recent past; memory as their peak, M*.

    reserved: share of the capacity kept back for forecasts that were too low.
    window: how many finished requests of a service are remembered.
    cold_start: "kaplan-meier" or "max"; what is believed before as many have finished (``LengthHistory``).
    draws: "mean" of M* over 10 draws (fewer for more than 64 requests, at least 3), or "max" over
        min(5, 200 // requests + 1), as LightLLM does.
    """

    reserved: float = 0.05
    window: int = 1000
    cold_start: str = "kaplan-meier"
    draws: str = "mean"

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

    def belief(self, crowds: Sequence[Crowd]) -> Belief:
        """Several draws."""
        requests = max(1, sum(map(len, crowds)))
        if self.draws == "mean":
            # Where many requests add up, each draw is nearer to the mean, and fewer will do.
            return draws(min(10, max(3, 640 // requests)))
        return draws(min(5, 200 // requests + 1))

    def combine(self, peaks: Sequence[int]) -> float:
        """Mean or largest."""
        return sum(peaks) / len(peaks) if self.draws == "mean" else max(peaks)

    def new_history(self, maximum: int) -> LengthHistory:
        """A window as asked for."""
        return LengthHistory(maximum, self.window, self.cold_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle(Forecasting):
    """The true output lengths (``Request.true_output_tokens``; the ceiling where unknown), as M*."""

    def limit(self, capacity: int) -> float:
        """All of it."""
        return capacity

    def belief(self, crowds: Sequence[Crowd]) -> Belief:
        """The truth."""
        return TRUTHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted(Forecasting):
    """The output lengths that the scheduler's predictor believes (``SchedulerOptions.lengths``), as M*.

    UELLM (section on its resource profiler): memory is set aside by a request's predicted length, and
    corrected when a request outgrows it.

    reserved: share of the capacity kept back for predictions that were too low.
    """

    reads_lengths: ClassVar[bool] = True

    reserved: float = 0.05

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        _require(0 <= self.reserved < 1, "reserved", "must be in [0, 1)", self.reserved)

    def limit(self, capacity: int) -> float:
        """The capacity without the reserve."""
        return (1 - self.reserved) * capacity

    def belief(self, crowds: Sequence[Crowd]) -> Belief:
        """The predictions."""
        return PREDICTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Admission):
    """Every request owns the blocks of its next ``tokens`` output tokens, and is scheduled anew after them.

    SCLS on continuous batching: memory for a slice is reserved exactly, so that nobody is evicted inside one.
    At its end a request keeps its KV and waits for memory for the next; where nobody can go on, one is
    evicted.
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

    def demand(self, crowds: Sequence[Crowd]) -> float:
        """What is known already; slices are allocated, so that the pool itself says what is left."""
        return sum([crowd.footprint for crowd in crowds])


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
