"""Views of weights as plain values, for residency policies."""

from collections.abc import Sequence

from schedule_builders import SECOND, make_state

from shoal.core import NO_GOALS, SLO
from shoal.schedule import RequestState
from shoal.schedule.policies.residency import Place, ResidencyDecision, ResidencyView, WeightsView
from shoal.schedule.running_batch import RequestTable

__all__ = ["SECOND", "absent", "evicted_for", "fetched", "requests", "resident", "view_of"]


def requests(
    count: int = 1,
    *,
    at_s: float = 0.0,
    generated: int = 0,
    service_time_s: float = 0.0,
    last_step_s: float | None = None,
    slo: SLO = NO_GOALS,
) -> list[RequestState]:
    """``count`` equal requests that arrived at ``at_s``; those with a last step have KV on the device."""
    states = []
    for _ in range(count):
        state = make_state(arrival_s=at_s, generated=generated, service_time_s=service_time_s, slo=slo)
        state.last_scheduled_ns = round((at_s if last_step_s is None else last_step_s) * SECOND)
        state.seq_id = -1 if last_step_s is None else state.number
        states.append(state)
    return states


def absent(
    name: str,
    *parts: Sequence[RequestState],
    num_bytes: int = 1,
    fetch_s: float = 0.2,
    execution_s: float = 1.0,
    since_s: float = 0.0,
) -> WeightsView:
    """Absent weights with some requests."""
    return _weights(
        name,
        [state for part in parts for state in part],
        num_bytes=num_bytes,
        place=Place.ABSENT,
        since_ns=round(since_s * SECOND),
        evictable=False,
        evictable_ns=None,
        fetch_s=fetch_s,
        last_step_ns=0,
        execution_s=execution_s,
    )


def resident(
    name: str,
    *parts: Sequence[RequestState],
    num_bytes: int = 1,
    fetch_s: float = 0.2,
    execution_s: float = 1.0,
    since_s: float = 0.0,
    last_step_s: float = 0.0,
    pinned: bool = False,
    evictable: bool = True,
    evictable_s: float = 0.0,
) -> WeightsView:
    """Resident weights with some requests."""
    return _weights(
        name,
        [state for part in parts for state in part],
        num_bytes=num_bytes,
        place=Place.RESIDENT,
        since_ns=round(since_s * SECOND),
        evictable=evictable and not pinned,
        evictable_ns=None if pinned else round(evictable_s * SECOND),
        fetch_s=fetch_s,
        last_step_ns=round(last_step_s * SECOND),
        execution_s=execution_s,
    )


def _weights(name: str, states: Sequence[RequestState], **fields: object) -> WeightsView:
    waiting = [state for state in states if state.seq_id < 0]
    return WeightsView(
        name=name,
        num_waiting=len(waiting),
        num_running=len(states) - len(waiting),
        oldest_ns=min([state.arrival_ns for state in waiting], default=None),
        requests=lambda: RequestTable(states),
        **fields,  # type: ignore[arg-type]
    )


def view_of(*weights: WeightsView, free_bytes: int = 0) -> ResidencyView:
    return ResidencyView({each.name: each for each in weights}, free_bytes)


def fetched(decision: ResidencyDecision) -> list[str]:
    """Weights that a decision would fetch, by preference."""
    return [swap.fetch for swap in decision.swaps]


def evicted_for(decision: ResidencyDecision, name: str) -> list[str]:
    """Weights that may leave for ``name``, in this order."""
    return next(list(swap.evict) for swap in decision.swaps if swap.fetch == name)
