"""Options of planning: latency goals (``--slo``), required SLO attainment, extent of the search."""

from dataclasses import dataclass

from shoal.config.policies import parse_pairs
from shoal.config.sections import section_of
from shoal.config.services import goal_kinds
from shoal.core import NO_GOALS, SLO, ConfigError


def parse_goals(text: str | None) -> SLO:
    """Parse ``ttft=2s,tpot=100ms``; None: no goals. Raises ConfigError."""
    if text is None:
        return NO_GOALS
    goals: SLO = section_of(SLO, goal_kinds()).read(parse_pairs(text, "--slo", "slo"), "slo")
    return goals


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """Required attainment and extent of the search; raises ConfigError for numbers out of range."""

    attainment: float = 0.95
    """Share of the requests of every service that must meet their goals."""
    trials: int = 27
    """Schedulers to try on a fleet that nearly suffices; 1: only the default."""
    share: float = 0.6
    """Share of the workload to plan for; the rest is held out."""
    seed: int = 0
    """Seed of random schedulers and of the bootstrap."""
    processes: int | None = None
    """Processes that simulate; None: one for each core."""

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigError(
                f"an attainment is above 0% and at most 100%, such as 95%; got {self.attainment * 100:g}%"
            )
        if self.trials < 1:
            raise ConfigError(f"trials must be at least 1, the default itself; got {self.trials}")
        if not 0 < self.share < 1:
            raise ConfigError(f"the share to plan for must be above 0 and below 1, got {self.share:g}")
