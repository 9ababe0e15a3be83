"""Earliest deadline first."""

from dataclasses import dataclass

import numpy as np

from shoal.core import NO_GOALS
from shoal.schedule.columns import Columns
from shoal.schedule.group import GroupView
from shoal.schedule.orders.by_priority import ByPriority, FloatArray, require
from shoal.schedule.tracked import Tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class EarliestDeadline(ByPriority):
    """The request whose next token is due first steps, with its service.

    By its goals the first token is due ``ttft_s`` after arrival, each further one ``tpot_s`` after the one
    before, and everything ``e2e_s`` after arrival: the earliest of what applies counts. Tokens that came
    early leave slack for others.

    default_s: after arrival, when a request is due to which no goal applies (any more), and the first token
    of one that has a goal for the time per token alone.
    """

    default_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        require(self.default_s >= 0, "edf", "default_s", "must not be negative", self.default_s)

    def allowed_s(self, one: Tracked) -> float:
        """From arrival to the deadline of the next token, in seconds."""
        slo = one.slo
        first = slo.ttft_s
        next_s = None
        if slo.tpot_s is not None:
            next_s = (self.default_s if first is None else first) + one.generated * slo.tpot_s
        elif not one.generated:
            next_s = first
        if slo.e2e_s is not None and (next_s is None or slo.e2e_s < next_s):
            return slo.e2e_s
        return self.default_s if next_s is None else next_s

    def rank(self, one: Tracked, group: GroupView) -> float:
        """The deadline of its next token."""
        return one.request.arrival_ns + self.allowed_s(one) * 1e9

    def urgencies(self, group: GroupView, columns: Columns) -> FloatArray:
        """Deadlines in nanoseconds on the clock of arrivals."""
        deadlines_ns = [
            one.request.arrival_ns + (self.default_s if one.slo is NO_GOALS else self.allowed_s(one)) * 1e9
            for one in columns.requests
        ]
        return np.array(deadlines_ns, dtype=np.float64)
