"""Shortest remaining predicted time first."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.schedule.policies.orders.by_priority import ByPriority, require
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestRemaining(ByPriority):
    """The request that is predicted to end first steps, with its service.

    Its remaining time is the output that the length predictor still expects, times the service's execution
    time per output token.
    """

    reads_lengths: ClassVar[bool] = True

    token_s: float = 0.02
    """Seconds per output token of services of which no request has finished."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        require(self.token_s > 0, "shortest-remaining", "token_s", "must be above 0", self.token_s)

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """Predicted output tokens left, which among requests of one service is as good as time."""
        return request.predicted_tokens - request.num_generated

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """Remaining seconds."""
        traits = view.traits
        tokens = traits.mean_output_tokens
        token_s = self.token_s if tokens is None else traits.mean_s / tokens
        return (table.predicted_tokens - table.num_generated) * token_s
