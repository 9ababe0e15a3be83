"""Nobody waits for ever: who has gone without a step too long, whatever the order prefers.

SeaLLM (section 4.2) serves starved requests first. Under overload everybody who waits is starved, and an
order would be none; so here each service's longest unserved request comes first, but once per threshold.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from shoal.schedule.admitter import prompt_computer
from shoal.schedule.policies.orders import Turn
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import IntArray, RunningBatch
from shoal.schedule.service_state import ServiceState

_LONGEST_NS = 1 << 61
_MOST_DOUBLINGS = 20


class StarvationGuard:
    """Watches over requests that have not taken part in a step for ``threshold_ns``.

    The threshold of a request doubles whenever it was preempted for a starved one, so that two that do not
    fit beside each other get ever longer turns instead of preempting one another for ever.
    """

    def __init__(self, threshold_ns: int) -> None:
        self._threshold_ns = min(threshold_ns, _LONGEST_NS)
        self._most_doublings = min(
            _MOST_DOUBLINGS, _LONGEST_NS.bit_length() - self._threshold_ns.bit_length()
        )

    def due_ns(self, request: RequestState) -> int:
        """When a waiting request starves."""
        doublings = min(request.num_preempted_by_starvation, self._most_doublings)
        return request.last_scheduled_ns + (self._threshold_ns << doublings)

    def _running_due_ns(self, batch: RunningBatch) -> IntArray:
        """When running requests starve; not while they are postponed."""
        doublings = np.minimum(batch.num_preempted_by_starvation, self._most_doublings)
        due_ns = batch.last_scheduled_ns + (self._threshold_ns << doublings)
        return np.where(batch.postponed, sys.maxsize, due_ns)

    def _earliest_due_ns(self, batch: RunningBatch) -> int:
        """No running request starves before that."""
        last_ns = batch.last_scheduled_ns
        return int(last_ns[last_ns.argmin()]) + self._threshold_ns

    def starving(self, services: Iterable[ServiceState], now_ns: int) -> list[RequestState]:
        """At most one request of each service, the longest starved first."""
        found = [
            starved[0]
            for state in services
            if now_ns >= self._next_ns(state) and (starved := self._starved(state, now_ns))
        ]
        found.sort(key=lambda pair: pair[0])
        return [request for _, request in found]

    def turns(self, services: Mapping[str, ServiceState], now_ns: int) -> Iterator[tuple[RequestState, Turn]]:
        """Requests that starve, and a turn for each, made when it is asked for."""
        for request in self.starving(services.values(), now_ns):
            running = services[request.service].running
            if request.seq_id < 0:
                # Who waits for the prompt that another choice computes is helped by helping that one.
                request = prompt_computer(request, running) or request
            yield request, starved_turn(request, running)

    def served(self, state: ServiceState, now_ns: int) -> None:
        """A plan was made for a starved request of the service."""
        state.starved_served_ns = now_ns

    def next_ns(self, services: Iterable[ServiceState]) -> int | None:
        """When somebody will starve next; None while nobody can."""
        times = []
        for state in services:
            waits = state.waiting.first_due()
            due = [] if waits is None else [self.due_ns(waits)]
            if len(state.running) > np.count_nonzero(state.running.postponed):
                due.append(int(self._running_due_ns(state.running).min()))
            if due:
                times.append(max(self._next_ns(state), min(due)))
        return min(times, default=None)

    def earliest_starvation_ns(self, state: ServiceState) -> int:
        """A time before which nobody of a service starves, if all who run take part in every step."""
        waits = state.waiting.first_due()
        due_ns = self._earliest_due_ns(state.running)
        if waits is not None:
            due_ns = min(due_ns, self.due_ns(waits))
        return max(due_ns, self._next_ns(state))

    def _next_ns(self, state: ServiceState) -> int:
        return 0 if state.starved_served_ns is None else state.starved_served_ns + self._threshold_ns

    def _starved(self, state: ServiceState, now_ns: int) -> list[tuple[int, RequestState]]:
        """(when it starved, request) of who waits and of who runs, for whom it was longest ago."""
        starved = []
        waits = state.waiting.first_due()
        if waits is not None and now_ns >= (due_ns := self.due_ns(waits)):
            starved.append((due_ns, waits))
        batch = state.running
        if len(batch) and now_ns >= self._earliest_due_ns(batch):
            due = self._running_due_ns(batch)
            row = int(due.argmin())
            if now_ns >= due[row] and not batch.in_flight[row]:
                starved.append((int(due[row]), batch.requests[row]))
        starved.sort(key=lambda pair: pair[0])
        return starved


def starved_turn(request: RequestState, batch: RunningBatch) -> Turn:
    """A turn for a starved request: alone for a prompt, first among all of its service for a decode."""
    if request.seq_id < 0:
        return Turn(request.service, np.zeros(0, dtype=np.int64), waiting=(request,), prefill=True)
    if batch.prefilling[batch.row_of(request)]:
        return Turn(request.service, np.array([request.seq_id]))
    others = batch.seq_id != request.seq_id
    return Turn(request.service, batch.seq_id.copy(), others.astype(np.float64))
