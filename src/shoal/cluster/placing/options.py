"""Options of the placement of a running cluster."""

from dataclasses import dataclass
from typing import Literal

from shoal.core import ConfigError
from shoal.place.re_placement import IntervalRule

PlacementPolicy = Literal["fixed", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """Whether and how often the services' engines change with the traffic."""

    policy: PlacementPolicy = "fixed"
    """``fixed``: as configured. ``search``: a search on the traffic of every interval."""
    interval_s: float = 60.0
    """Length of the first interval."""
    min_interval_s: float = 20.0
    max_interval_s: float = 600.0
    beta: float = 0.1
    """Relative error of an estimate above which intervals become shorter, and their relative change."""
    hysteresis: bool = True
    """Whether a change needs a gain that is worth it; without, the best placement found is always taken."""
    search_time_s: float = 30.0
    """A search ends after this time with the best that it has."""

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers out of range."""
        if not 0 < self.min_interval_s <= self.interval_s <= self.max_interval_s:
            raise ConfigError(
                "placement: min_interval, interval and max_interval must be above 0 and not fall, got "
                f"{self.min_interval_s:g}, {self.interval_s:g} and {self.max_interval_s:g} s"
            )
        if not 0 < self.beta < 1:
            raise ConfigError(f"placement.beta must be between 0 and 1, got {self.beta:g}")
        if not self.search_time_s > 0:
            raise ConfigError(f"placement.search_time must be above 0, got {self.search_time_s:g} s")

    @property
    def rule(self) -> IntervalRule:
        """How long intervals are (SeaLLM, Eq. 8)."""
        return IntervalRule(
            first_s=self.interval_s, least_s=self.min_interval_s, most_s=self.max_interval_s, beta=self.beta
        )
