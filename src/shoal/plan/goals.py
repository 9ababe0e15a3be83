"""What is asked of a plan: latency goals, and how many requests are to meet them."""

from dataclasses import dataclass

from shoal.config.policies import parse_pairs
from shoal.config.sections import section_of
from shoal.config.services import goal_kinds
from shoal.core import NO_GOALS, SLO, ConfigError


def read_goals(text: str | None) -> SLO:
    """The goals in ``ttft=2s,tpot=100ms``; None: none. Raises ConfigError for what is no goal."""
    if text is None:
        return NO_GOALS
    goals: SLO = section_of(SLO, goal_kinds()).read(parse_pairs(text, "--slo", "slo"), "slo")
    return goals


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for, and how far to look."""

    attainment: float = 0.95
    """Share of the requests of every service that meet their goals."""
    trials: int = 27
    """Schedulers to try where the default misses the attainment and devices are sought; 1: none but the
    default."""
    share: float = 0.6
    """Of the workload that is planned for; the rest is held out."""
    seed: int = 0
    """Keys the schedulers that are drawn, and the resampling of requests."""
    processes: int | None = None
    """That simulate; None: one for each core."""

    def __post_init__(self) -> None:
        """Refuse numbers without meaning; raises ConfigError."""
        if not 0 < self.attainment <= 1:
            raise ConfigError(
                f"an attainment is above 0% and at most 100%, such as 95%; got {self.attainment * 100:g}%"
            )
        if self.trials < 1:
            raise ConfigError(f"trials must be at least 1, the default itself; got {self.trials}")
        if not 0 < self.share < 1:
            raise ConfigError(f"the share to plan for must be above 0 and below 1, got {self.share:g}")
