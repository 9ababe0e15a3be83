"""Admissions that add up tokens: the most that can come, or those that are there."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.schedule.policies.admissions.base import Admission, Numbers, known_tokens, require, sum_with_each
from shoal.schedule.policies.memory_forecast import MemoryForecast, most_tokens
from shoal.schedule.running_batch import IntArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSum(Admission):
    """Each request has tokens set aside for it, and none leaves before another."""

    @abstractmethod
    def tokens_set_aside(self, table: RequestTable) -> IntArray:
        """For each request, at least those that are known [n]."""

    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """The sum of what is set aside."""
        return sum(
            [
                forecast.merged(forecast.blocks_of(self.tokens_set_aside(forecast.table)))
                for forecast in forecasts
            ]
        )

    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """The same with candidates."""
        return sum_with_each(self.tokens_set_aside, running, candidates, others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservative(TokenSum):
    """Every request takes all it may, and none leaves before another: prompt + most output, summed up."""

    stays_rejected: ClassVar[bool] = True

    overcommit: float = 1.0
    """Share of the capacity that this sum may reach, 1.5 for 150%."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        require(self.overcommit > 0, "overcommit", "must be above 0", self.overcommit)

    @property
    def reads_limits(self) -> bool:
        """Always."""
        return True

    def limit(self, capacity: int) -> float:
        """The overcommitted capacity."""
        return self.overcommit * capacity

    def tokens_set_aside(self, table: RequestTable) -> IntArray:
        """All that each may have."""
        return most_tokens(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownTokens(TokenSum):
    """What is known already counts, and nothing else."""

    def tokens_set_aside(self, table: RequestTable) -> IntArray:
        """Those that are known."""
        return known_tokens(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggressive(_KnownTokens):
    """No request grows: tokens held and the candidate's are all that counts."""

    stays_rejected: ClassVar[bool] = True

    watermark: float = 0.95
    """Share of the capacity that they may reach."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        require(0 < self.watermark <= 1, "watermark", "must be in (0, 1]", self.watermark)

    def limit(self, capacity: int) -> float:
        """The capacity up to the watermark."""
        return self.watermark * capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(_KnownTokens):
    """Every request owns the blocks of its next ``tokens`` output tokens, and is scheduled anew after them.

    SCLS on continuous batching: memory for a slice is reserved exactly, so that nobody is preempted inside
    one. At its end a request keeps its KV and waits for memory for the next; where nobody can go on, one is
    preempted.
    """

    tokens: int = 128

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        Admission.__post_init__(self)
        require(self.tokens >= 1, "tokens", "must be at least 1", self.tokens)

    @property
    def slice_tokens(self) -> int:
        """The length of a slice."""
        return self.tokens

    def limit(self, capacity: int) -> float:
        """All of it."""
        return capacity
