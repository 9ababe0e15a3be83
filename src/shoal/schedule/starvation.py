"""Starvation guard: requests without a step for too long go first, regardless of the order.

SeaLLM (section 4.2) serves starved requests first. Under overload all waiting requests are starved, and the
order would have no effect; so here the longest starved request of each service goes first, once per
threshold.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from shoal.schedule.admitter import choice_computing_prompt
from shoal.schedule.policies.orders import Turn
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import IntArray, RunningBatch
from shoal.schedule.service_state import ServiceState

_LONGEST_NS = 1 << 61
_MAX_DOUBLINGS = 20


class StarvationGuard:
    """Finds requests that have not taken part in a step for ``threshold_ns``.

    The threshold of a request doubles with each preemption for a starved request, so that two requests that
    do not fit in memory together get ever longer turns instead of preempting each other all the time.
    """

    def __init__(self, threshold_ns: int) -> None:
        self.threshold_ns = min(threshold_ns, _LONGEST_NS)
        self._max_doublings = min(_MAX_DOUBLINGS, _LONGEST_NS.bit_length() - self.threshold_ns.bit_length())

    def due_ns(self, request: RequestState) -> int:
        """Time at which a waiting request starves."""
        doublings = min(request.num_preempted_by_starvation, self._max_doublings)
        return request.last_scheduled_ns + (self.threshold_ns << doublings)

    def _running_due_ns(self, batch: RunningBatch) -> IntArray:
        """Times at which running requests starve; postponed requests do not."""
        doublings = np.minimum(batch.num_preempted_by_starvation, self._max_doublings)
        due_ns = batch.last_scheduled_ns + (self.threshold_ns << doublings)
        return np.where(batch.postponed, sys.maxsize, due_ns)

    def _earliest_due_ns(self, batch: RunningBatch) -> int:
        """A lower bound on ``_running_due_ns``."""
        last_ns = batch.last_scheduled_ns
        return int(last_ns[last_ns.argmin()]) + self.threshold_ns

    def starving(self, services: Iterable[ServiceState], now_ns: int) -> list[RequestState]:
        """At most one starved request of each service, the longest starved first."""
        found = [
            starved[0]
            for state in services
            if now_ns >= self._not_before_ns(state) and (starved := self._starved(state, now_ns))
        ]
        found.sort(key=lambda pair: pair[0])
        return [request for _, request in found]

    def turns(self, services: Mapping[str, ServiceState], now_ns: int) -> Iterator[tuple[RequestState, Turn]]:
        """Starved requests with a turn for each, created one at a time."""
        for request in self.starving(services.values(), now_ns):
            running = services[request.service].running
            if request.seq_id < 0:
                # If another choice is computing its prompt, that one needs the turn.
                request = choice_computing_prompt(request, running) or request
            yield request, starved_turn(request, running)

    def served(self, state: ServiceState, now_ns: int) -> None:
        """A plan was made for a starved request of the service."""
        state.starved_served_ns = now_ns

    def next_starvation_ns(self, services: Iterable[ServiceState]) -> int | None:
        """Time at which the next request starves; None: no request can."""
        times = []
        for state in services:
            first_waiting = state.waiting.first_to_starve()
            due = [] if first_waiting is None else [self.due_ns(first_waiting)]
            if len(state.running) > np.count_nonzero(state.running.postponed):
                due.append(int(self._running_due_ns(state.running).min()))
            if due:
                times.append(max(self._not_before_ns(state), min(due)))
        return min(times, default=None)

    def earliest_starvation_ns(self, state: ServiceState) -> int:
        """Time before which no request of a service starves, if every step has all running requests."""
        first_waiting = state.waiting.first_to_starve()
        due_ns = self._earliest_due_ns(state.running)
        if first_waiting is not None:
            due_ns = min(due_ns, self.due_ns(first_waiting))
        return max(due_ns, self._not_before_ns(state))

    def _not_before_ns(self, state: ServiceState) -> int:
        return 0 if state.starved_served_ns is None else state.starved_served_ns + self.threshold_ns

    def _starved(self, state: ServiceState, now_ns: int) -> list[tuple[int, RequestState]]:
        """(time of starvation, request) of the longest starved waiting and running request, if any."""
        starved = []
        first_waiting = state.waiting.first_to_starve()
        if first_waiting is not None and now_ns >= (due_ns := self.due_ns(first_waiting)):
            starved.append((due_ns, first_waiting))
        batch = state.running
        if len(batch) and now_ns >= self._earliest_due_ns(batch):
            due = self._running_due_ns(batch)
            row = int(due.argmin())
            if now_ns >= due[row] and not batch.in_flight[row]:
                starved.append((int(due[row]), batch.requests[row]))
        starved.sort(key=lambda pair: pair[0])
        return starved


def starved_turn(request: RequestState, batch: RunningBatch) -> Turn:
    """A turn for a starved request: alone for a prompt, with highest priority in its service for a decode."""
    if request.seq_id < 0:
        return Turn(request.service, np.zeros(0, dtype=np.int64), waiting=(request,), prefill=True)
    if batch.prefilling[batch.row_of(request)]:
        return Turn(request.service, np.array([request.seq_id]))
    others = batch.seq_id != request.seq_id
    return Turn(request.service, batch.seq_id.copy(), others.astype(np.float64))
