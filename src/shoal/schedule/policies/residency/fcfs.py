"""Residency policy ``fcfs``: weights of the oldest waiting request come, the least recently used leave."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.schedule.policies.residency.protocol import (
    Place,
    ResidencyDecision,
    ResidencyView,
    Swap,
    WeightsView,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FcfsResidency:
    """First come, first served, as Ollama and most servers of several models do."""

    def decide(self, view: ResidencyView, now_ns: int) -> ResidencyDecision:
        """A swap for each absent weights with requests, those of the oldest request first."""
        leaving = least_recently_used(view)
        wanted = sorted(absent_with_work(view), key=lambda weights: (oldest_ns(weights), weights.name))
        return ResidencyDecision([Swap(weights.name, leaving) for weights in wanted])


def absent_with_work(view: ResidencyView) -> list[WeightsView]:
    """Absent weights that have requests."""
    return [each for each in view.weights.values() if each.place is Place.ABSENT and each.num_requests]


def least_recently_used(view: ResidencyView) -> list[str]:
    """Names of evictable weights, those without a step for the longest time first."""
    return by_last_step(each for each in view.weights.values() if each.evictable)


def by_last_step(weights: Iterable[WeightsView]) -> list[str]:
    """Their names, those without a step for the longest time first."""
    return [each.name for each in sorted(weights, key=lambda each: (each.last_step_ns, each.name))]


def oldest_ns(weights: WeightsView) -> int:
    """Arrival of their oldest request, running ones included."""
    table = weights.requests()
    return int(table.arrival_ns.min()) if len(table) else 0
