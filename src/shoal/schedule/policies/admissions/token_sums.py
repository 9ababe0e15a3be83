"""Admissions that sum up maximum or known tokens of all requests: conservative, aggressive, batch, slice."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shoal.schedule.policies.admissions.base import Admission, Numbers, known_tokens, require, sum_with_each
from shoal.schedule.policies.memory_forecast import MemoryForecast, max_stored_tokens
from shoal.schedule.running_batch import IntArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSum(Admission):
    """Base of admissions that reserve tokens for each request, as if all requests ended together."""

    @abstractmethod
    def reserved_tokens(self, table: RequestTable) -> IntArray:
        """Tokens reserved for each request, at least the known ones [n]."""

    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """Sum of the reserved tokens, in merged blocks."""
        return sum(
            [
                forecast.merged(forecast.blocks_of(self.reserved_tokens(forecast.table)))
                for forecast in forecasts
            ]
        )

    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """See ``Admission``."""
        return sum_with_each(self.reserved_tokens, running, candidates, others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservative(TokenSum):
    """Reserves prompt + maximum output for every request."""

    stays_rejected: ClassVar[bool] = True

    overcommit: float = 1.0
    """Share of the capacity that this sum may reach, 1.5 for 150%."""

    def __post_init__(self) -> None:
        Admission.__post_init__(self)
        require(self.overcommit > 0, "overcommit", "must be above 0", self.overcommit)

    @property
    def reads_limits(self) -> bool:
        return True

    def limit(self, capacity: int) -> float:
        return self.overcommit * capacity

    def reserved_tokens(self, table: RequestTable) -> IntArray:
        return max_stored_tokens(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownTokens(TokenSum):
    """Reserves known tokens only."""

    def reserved_tokens(self, table: RequestTable) -> IntArray:
        return known_tokens(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggressive(_KnownTokens):
    """Counts the known tokens of the running requests and the candidate, without further growth."""

    stays_rejected: ClassVar[bool] = True

    watermark: float = 0.95
    """Share of the capacity that they may use."""

    def __post_init__(self) -> None:
        Admission.__post_init__(self)
        require(0 < self.watermark <= 1, "watermark", "must be in (0, 1]", self.watermark)

    def limit(self, capacity: int) -> float:
        return self.watermark * capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(_KnownTokens):
    """One batch of each service at a time: the next begins when the last is over.

    Batches are formed by the cluster's manager (SCLS, section 4; UELLM, section 4.2). Requests of the batch
    that runs join it as far as their known tokens fit, in the order of the queue; a preempted one comes back.
    """

    by_batch: ClassVar[bool] = True

    def limit(self, capacity: int) -> float:
        """The whole capacity."""
        return capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(_KnownTokens):
    """Every request reserves the blocks of its next ``tokens`` output tokens, and then needs a new slice.

    SCLS on continuous batching: memory for a slice is reserved exactly, so that no request is preempted
    inside one. At its end a request keeps its KV and waits for memory for the next; if no request can
    continue, one is preempted.
    """

    tokens: int = 128

    def __post_init__(self) -> None:
        Admission.__post_init__(self)
        require(self.tokens >= 1, "tokens", "must be at least 1", self.tokens)

    @property
    def slice_tokens(self) -> int:
        return self.tokens

    def limit(self, capacity: int) -> float:
        """The whole capacity."""
        return capacity
