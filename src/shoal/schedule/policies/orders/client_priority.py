"""Order ``priority``: the priorities that clients give their requests."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.schedule.policies.orders.by_priority import ByPriority
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPriority(ByPriority):
    """The request with the lowest ``priority`` picks its service; equal ones first come, first served."""

    reads_priorities: ClassVar[bool] = True

    def rank(self, request: RequestState, view: ServiceView) -> float:
        return float(request.priority)

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        return table.priority.astype(float)
