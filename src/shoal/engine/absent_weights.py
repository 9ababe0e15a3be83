"""AbsentWeights: weights that are not in an engine's memory, for those who choose the engine of a request."""

import msgspec

from shoal.schedule import Scheduler
from shoal.schedule.policies.residency import Place
from shoal.schedule.weights import MAX_FAILURES


class AbsentWeights(msgspec.Struct, frozen=True, array_like=True):
    """Weights that are absent from an engine's memory, and not coming."""

    services: tuple[str, ...]
    """Those that share them."""
    fetch_s: float
    """Expected duration of their fetch."""
    failing: bool = False
    """Whether the last fetches failed, so that requests for them end."""


def absent_weights(scheduler: Scheduler) -> tuple[AbsentWeights, ...]:
    """The absent weights of an engine."""
    return tuple(
        AbsentWeights(tuple(entry.states), scheduler.fetch_s(entry), entry.num_failures >= MAX_FAILURES)
        for entry in scheduler.weights.values()
        if entry.place is Place.ABSENT
    )
