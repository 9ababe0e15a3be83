"""StarvationThreshold: when the requests of one service starve."""

import sys

import numpy as np

from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import IntArray, RunningBatch

_LONGEST_NS = 1 << 61
_MAX_DOUBLINGS = 20


class StarvationThreshold:
    """A request starves that has not taken part in a step for ``ns``.

    The threshold of a request doubles with each preemption for a starved request, so that two requests that
    do not fit in memory together get ever longer turns instead of preempting each other all the time.
    """

    def __init__(self, threshold_s: float) -> None:
        self.ns = round(min(threshold_s * 1e9, _LONGEST_NS))
        self._max_doublings = min(_MAX_DOUBLINGS, _LONGEST_NS.bit_length() - self.ns.bit_length())

    def due_ns(self, request: RequestState) -> int:
        """Time at which a waiting request starves."""
        doublings = min(request.num_preempted_by_starvation, self._max_doublings)
        return request.last_scheduled_ns + (self.ns << doublings)

    def running_due_ns(self, batch: RunningBatch) -> IntArray:
        """Times at which running requests starve; postponed requests do not."""
        doublings = np.minimum(batch.num_preempted_by_starvation, self._max_doublings)
        due_ns = batch.last_scheduled_ns + (self.ns << doublings)
        return np.where(batch.postponed, sys.maxsize, due_ns)

    def earliest_due_ns(self, batch: RunningBatch) -> int:
        """A lower bound on ``running_due_ns``."""
        last_ns = batch.last_scheduled_ns
        return int(last_ns[last_ns.argmin()]) + self.ns
