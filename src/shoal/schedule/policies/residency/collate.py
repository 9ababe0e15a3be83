"""Residency policy ``collate``: requests for resident weights first, then those that waited longest."""

from dataclasses import dataclass

from shoal.schedule.policies.residency.fcfs import absent_with_work, by_last_step, oldest_ns
from shoal.schedule.policies.residency.protocol import ResidencyDecision, ResidencyView, Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class CollateResidency:
    """Weights stay as long as they have requests, also those that arrived after requests for absent ones.

    As servers do that put requests for one model together. It needs the fewest fetches.
    Weights with requests at all times leave only because a request for others has waited too long.
    """

    def decide(self, view: ResidencyView, now_ns: int) -> ResidencyDecision:
        """A swap for each absent weights with requests, those of the oldest request first."""
        leaving = by_last_step(
            each for each in view.weights.values() if each.evictable and not each.num_requests
        )
        wanted = sorted(absent_with_work(view), key=lambda each: (oldest_ns(each), each.name))
        return ResidencyDecision([Swap(each.name, leaving) for each in wanted])
