"""The priorities that clients give their requests."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.schedule.policies.orders.by_priority import ByPriority
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPriority(ByPriority):
    """The request with the lowest ``priority`` steps, with its service; equals are served as they came."""

    reads_priorities: ClassVar[bool] = True

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """Its priority."""
        return float(request.priority)

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """Priorities."""
        return table.priority.astype(float)
