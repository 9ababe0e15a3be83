"""What every admission answers, and the sums that several of them begin with."""

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

    @property
    def reads_limits(self) -> bool:
        """Whether it sets memory aside for the longest output that a request may have, at least at first."""
        return False

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


def leading(fits: npt.NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    first = int(fits.argmin())
    return len(fits) if fits[first] else first


def known_tokens(table: RequestTable) -> IntArray:
    """Tokens that are known already, those that plans in flight will sample included [n]."""
    return table.num_tokens_with_in_flight


def sum_with_each(
    tokens_of: Callable[[RequestTable], IntArray],
    running: MemoryForecast,
    candidates: RequestTable,
    others: Sequence[MemoryForecast],
) -> IntArray:
    """Merged blocks if each has as many tokens, with the first, the first two, ... of ``candidates`` [k]."""
    of_others = sum([other.merged(other.blocks_of(tokens_of(other.table))) for other in others])
    return running.with_each(tokens_of(running.table), tokens_of(candidates)) + of_others


def require(holds: bool, knob: str, rule: str, value: object) -> None:
    """Refuse a knob without meaning; raises ConfigError."""
    if not holds:
        raise ConfigError(f"admission {knob} {rule}, got {value!r}")
