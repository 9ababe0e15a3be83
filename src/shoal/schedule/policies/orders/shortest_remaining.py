"""Order ``shortest-remaining``: shortest predicted remaining time first (SRPT)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.schedule.policies.orders.by_priority import ByPriority, require
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestRemaining(ByPriority):
    """The request that is predicted to end first picks its service.

    The remaining time is the predicted rest of the output, times the service's execution time per output
    token.
    """

    reads_lengths: ClassVar[bool] = True

    token_s: float = 0.02
    """Assumed before the first request of a service has finished."""

    def __post_init__(self) -> None:
        require(self.token_s > 0, "shortest-remaining", "token_s", "must be above 0", self.token_s)

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """Predicted output tokens left, which inside a service gives the same order as time."""
        return request.predicted_tokens - request.num_generated

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """Remaining seconds."""
        traits = view.traits
        tokens = traits.mean_output_tokens
        token_s = self.token_s if tokens is None else traits.mean_s / tokens
        return (table.predicted_tokens - table.num_generated) * token_s
