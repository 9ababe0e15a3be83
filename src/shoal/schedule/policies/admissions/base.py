"""Interface of admission policies, and sums of tokens that several of them use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shoal.core import ConfigError
from shoal.forecast import LengthHistory
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable

Numbers = FloatArray | IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(ABC):
    """Decides from numbers alone; has options, no state."""

    stays_rejected: ClassVar[bool] = False
    """A rejected request stays rejected as long as the running requests only decode and none leaves."""
    reads_lengths: ClassVar[bool] = False
    """It uses predicted output lengths."""
    by_batch: ClassVar[bool] = False
    """Only requests of the batch that runs are admitted (``Request.batch``), or of the next one when none
    runs."""

    admit_every: int = 1
    """Requests are admitted only every so many steps, and whenever nothing is running."""

    def __post_init__(self) -> None:
        if self.admit_every < 1:
            raise ConfigError(f"admission admit_every must be at least 1 step, got {self.admit_every}")

    @property
    def slice_tokens(self) -> int | None:
        """Output tokens after which a request needs a new slice; None: no slices."""
        return None

    @property
    def reads_limits(self) -> bool:
        """Whether it ever reserves memory for the maximum output length of a request."""
        return False

    def how_many_fit(
        self,
        running: MemoryForecast,
        candidates: RequestTable,
        others: Sequence[MemoryForecast],
        capacity: int,
    ) -> int:
        """How many of ``candidates``, from the first on, fit in ``capacity`` merged blocks.

        running: requests of the candidates' service, with which the candidates share no blocks. others:
        requests of other services.
        """
        return num_leading(self.demand_with_each(running, candidates, others) <= self.limit(capacity))

    def fits(self, forecasts: Sequence[MemoryForecast], capacity: int) -> bool:
        """Whether requests (one forecast per service) fit in ``capacity`` merged blocks."""
        return bool(self.demand(forecasts) <= self.limit(capacity))

    @abstractmethod
    def limit(self, capacity: int) -> float:
        """Limit on the demand, in merged blocks."""

    @abstractmethod
    def demand(self, forecasts: Sequence[MemoryForecast]) -> float:
        """Merged blocks assumed to be needed at once, from ``footprint`` to ``max_footprint``."""

    @abstractmethod
    def demand_with_each(
        self, running: MemoryForecast, candidates: RequestTable, others: Sequence[MemoryForecast]
    ) -> Numbers:
        """``demand`` with the first, the first two, ... of ``candidates`` [k]; see ``how_many_fit``."""

    def new_history(self, maximum: int) -> LengthHistory:
        """The history of output lengths to keep for a service whose longest output is ``maximum``."""
        return LengthHistory(maximum)


def num_leading(fits: npt.NDArray[np.bool_]) -> int:
    """Number of leading true values."""
    first = int(fits.argmin())
    return len(fits) if fits[first] else first


def known_tokens(table: RequestTable) -> IntArray:
    """Known tokens, including those that plans in flight will sample [n]."""
    return table.num_tokens_with_in_flight


def sum_with_each(
    tokens_of: Callable[[RequestTable], IntArray],
    running: MemoryForecast,
    candidates: RequestTable,
    others: Sequence[MemoryForecast],
) -> IntArray:
    """Merged blocks for ``tokens_of`` requests, with the first, the first two, ... of ``candidates`` [k]."""
    of_others = sum([other.merged(other.blocks_of(tokens_of(other.table))) for other in others])
    return running.with_each(tokens_of(running.table), tokens_of(candidates)) + of_others


def require(valid: bool, option: str, rule: str, value: object) -> None:
    """Raises ConfigError if an option is not valid."""
    if not valid:
        raise ConfigError(f"admission {option} {rule}, got {value!r}")
