"""Latency goals from one line of text."""

from shoal.config.policies import parse_pairs
from shoal.config.sections import section_of
from shoal.config.services import goal_kinds
from shoal.core import NO_GOALS, SLO


def read_goals(text: str | None) -> SLO:
    """The goals in ``ttft=2s,tpot=100ms``; None: none. Raises ConfigError for what is no goal."""
    if text is None:
        return NO_GOALS
    goals: SLO = section_of(SLO, goal_kinds()).read(parse_pairs(text, "--slo", "slo"), "slo")
    return goals
