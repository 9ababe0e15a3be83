"""Order ``edf``: earliest deadline first, by the latency goals (SLO) of requests."""

from dataclasses import dataclass

import numpy as np

from shoal.schedule.policies.orders.by_priority import ByPriority, require
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class EarliestDeadline(ByPriority):
    """The request whose next token is due first picks its service.

    The first token is due ``ttft_s`` after arrival, each further one ``tpot_s`` after the one before was due
    and ``mtpot_s`` after it came, and the whole output ``e2e_s`` after arrival; the earliest applicable
    deadline counts. Tokens that are early give their request slack, but for ``mtpot_s``.
    """

    default_s: float = 60.0
    """Deadline after arrival of requests without an applicable goal, and of the first token if there is only
    a goal for the time per token."""

    def __post_init__(self) -> None:
        require(self.default_s >= 0, "edf", "default_s", "must not be negative", self.default_s)

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """The deadline of its next token."""
        return float(self.keys(view, RequestTable([request]))[0])

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """Deadlines of the next tokens, in nanoseconds on the clock of arrivals."""
        return table.arrival_ns + self._allowed_s(table) * 1e9

    def _allowed_s(self, table: RequestTable) -> FloatArray:
        """From arrival to the deadline of the next token, in seconds."""
        first = table.ttft_s
        later = np.where(np.isnan(first), self.default_s, first) + table.num_generated * table.tpot_s
        allowed = np.where(np.isnan(later) & (table.num_generated == 0), first, later)
        # The earliest applicable deadline; NaN: not applicable.
        allowed = np.fmin(allowed, table.e2e_s)
        next_s = (table.last_token_ns - table.arrival_ns) / 1e9 + table.mtpot_s
        allowed = np.where(table.num_generated > 0, np.fmin(allowed, next_s), allowed)
        return np.where(np.isnan(allowed), self.default_s, allowed)
