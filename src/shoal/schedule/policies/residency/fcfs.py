"""Residency policy ``fcfs``: weights of the oldest request come, the least recently used leave."""

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
    """First come, first served over all models, as Ollama and most servers of several models do.

    Weights leave only for requests that are older than all of their own, so requests are served to their ends
    in the order of arrival, but for those that find their weights resident.
    """

    def decide(self, view: ResidencyView, now_ns: int) -> ResidencyDecision:
        """A swap for each absent weights with requests, those of the oldest request first."""
        oldest = {name: oldest_ns(each) for name, each in view.weights.items() if each.num_requests}
        wanted = sorted(absent_with_work(view), key=lambda each: (oldest[each.name], each.name))
        evictable = [each for each in view.weights.values() if each.evictable]
        return ResidencyDecision(
            [
                Swap(
                    each.name,
                    by_last_step(
                        other
                        for other in evictable
                        if not other.num_requests or oldest[other.name] > oldest[each.name]
                    ),
                )
                for each in wanted
            ]
        )


def absent_with_work(view: ResidencyView) -> list[WeightsView]:
    """Absent weights that have requests."""
    return [each for each in view.weights.values() if each.place is Place.ABSENT and each.num_requests]


def by_last_step(weights: Iterable[WeightsView]) -> list[str]:
    """Their names: those without requests first, then those without a step for the longest time."""
    found = sorted(weights, key=lambda each: (each.num_requests > 0, each.last_step_ns, each.name))
    return [each.name for each in found]


def oldest_ns(weights: WeightsView) -> int:
    """Arrival of the oldest request, running ones included; there is at least one."""
    return int(weights.requests().arrival_ns.min())
