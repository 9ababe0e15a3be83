"""Shortest remaining predicted time first."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.schedule.columns import Columns
from shoal.schedule.group import GroupView
from shoal.schedule.orders.by_priority import ByPriority, FloatArray, require
from shoal.schedule.tracked import Tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestRemaining(ByPriority):
    """The request that is believed to end first steps, with its service.

    Its remaining time is the output that the length predictor still expects, times the service's execution
    time per output token.

    token_s: seconds per output token of services of which no request has finished.
    """

    reads_lengths: ClassVar[bool] = True

    token_s: float = 0.02

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        require(self.token_s > 0, "shortest-remaining", "token_s", "must be above 0", self.token_s)

    def rank(self, one: Tracked, group: GroupView) -> float:
        """Predicted output tokens left, which among requests of one service is as good as time."""
        return one.predicted - one.generated

    def urgencies(self, group: GroupView, columns: Columns) -> FloatArray:
        """Remaining seconds."""
        traits = group.traits
        tokens = traits.mean_output_tokens
        token_s = self.token_s if tokens is None else traits.mean_s / tokens
        return (columns.predicted - columns.generated) * token_s
