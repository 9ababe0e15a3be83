"""Starved requests: those without a step for too long go first, regardless of the order.

SeaLLM (section 4.2) serves starved requests first. Under overload all waiting requests are starved, and the
order would have no effect; so here the longest starved request of each service goes first, once per
threshold of the service.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from shoal.schedule.admitter import choice_computing_prompt
from shoal.schedule.policies.orders import Turn
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import RunningBatch
from shoal.schedule.service_state import ServiceState


def starving(services: Iterable[ServiceState], now_ns: int) -> list[RequestState]:
    """At most one starved request of each service, the longest starved first."""
    found = [
        starved[0]
        for state in services
        if now_ns >= _not_before_ns(state) and (starved := _starved(state, now_ns))
    ]
    found.sort(key=lambda pair: pair[0])
    return [request for _, request in found]


def starved_turns(services: Mapping[str, ServiceState], now_ns: int) -> Iterator[tuple[RequestState, Turn]]:
    """Starved requests with a turn for each, created one at a time."""
    for request in starving(services.values(), now_ns):
        running = services[request.service].running
        if request.seq_id < 0:
            # If another choice is computing its prompt, that one needs the turn.
            request = choice_computing_prompt(request, running) or request
        yield request, starved_turn(request, running)


def next_starvation_ns(services: Iterable[ServiceState]) -> int | None:
    """Time at which the next request starves; None: no request can."""
    times = []
    for state in services:
        first_waiting = state.waiting.first_to_starve()
        due = [] if first_waiting is None else [state.starvation.due_ns(first_waiting)]
        if len(state.running) > np.count_nonzero(state.running.postponed):
            due.append(int(state.starvation.running_due_ns(state.running).min()))
        if due:
            times.append(max(_not_before_ns(state), min(due)))
    return min(times, default=None)


def earliest_starvation_ns(state: ServiceState) -> int:
    """Time before which no request of a service starves, if every step has all running requests."""
    first_waiting = state.waiting.first_to_starve()
    due_ns = state.starvation.earliest_due_ns(state.running)
    if first_waiting is not None:
        due_ns = min(due_ns, state.starvation.due_ns(first_waiting))
    return max(due_ns, _not_before_ns(state))


def starved_turn(request: RequestState, batch: RunningBatch) -> Turn:
    """A turn for a starved request: alone for a prompt, with highest priority in its service for a decode."""
    if request.seq_id < 0:
        return Turn(request.service, np.zeros(0, dtype=np.int64), waiting=(request,), prefill=True)
    if batch.prefilling[batch.row_of(request)]:
        return Turn(request.service, np.array([request.seq_id]))
    others = batch.seq_id != request.seq_id
    return Turn(request.service, batch.seq_id.copy(), others.astype(np.float64))


def _not_before_ns(state: ServiceState) -> int:
    return 0 if state.starved_served_ns is None else state.starved_served_ns + state.starvation.ns


def _starved(state: ServiceState, now_ns: int) -> list[tuple[int, RequestState]]:
    """(time of starvation, request) of the longest starved waiting and running request, if any."""
    starved = []
    first_waiting = state.waiting.first_to_starve()
    if first_waiting is not None and now_ns >= (due_ns := state.starvation.due_ns(first_waiting)):
        starved.append((due_ns, first_waiting))
    batch = state.running
    if len(batch) and now_ns >= state.starvation.earliest_due_ns(batch):
        due = state.starvation.running_due_ns(batch)
        row = int(due.argmin())
        if now_ns >= due[row] and not batch.in_flight[row]:
            starved.append((int(due[row]), batch.requests[row]))
    starved.sort(key=lambda pair: pair[0])
    return starved
