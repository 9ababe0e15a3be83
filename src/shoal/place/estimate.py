"""What is expected of a placement, how placements are compared, and who estimates them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.place.placement import Placement

ALPHA = 1e-4
"""Weight of the normalised latency against one unserved request (SeaLLM, section 6.1)."""


@dataclass(frozen=True, slots=True)
class ServiceEstimate:
    """How one service fares, in requests of the traffic at hand."""

    requests: float
    """All that come."""
    unserved: float
    """Those that miss their goals, or that no engine takes."""
    answered: float = 0.0
    """Those that an engine answers, early or late."""
    latency_sum: float = 0.0
    """Their end-to-end latencies, each divided by the service's execution time L^, summed."""

    @property
    def attainment(self) -> float:
        """Share of requests that meet their goals; 1 without requests."""
        return 1 - self.unserved / self.requests if self.requests else 1.0

    @property
    def normalised_latency(self) -> float:
        """Mean of latency / L^ over answered requests; 0 without any."""
        return self.latency_sum / self.answered if self.answered else 0.0

    @property
    def unserved_index(self) -> float:
        """UI of SeaLLM's Eq. 6."""
        return self.unserved + ALPHA * self.normalised_latency


def added(parts: Collection[ServiceEstimate]) -> ServiceEstimate:
    """Parts of a service's requests, or several services, together."""
    if len(parts) == 1:
        return next(iter(parts))
    return ServiceEstimate(
        sum(part.requests for part in parts),
        sum(part.unserved for part in parts),
        sum(part.answered for part in parts),
        sum(part.latency_sum for part in parts),
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """How all services fare under a placement."""

    services: Mapping[str, ServiceEstimate]
    """By name; of every service, placed or not."""

    @property
    def total(self) -> ServiceEstimate:
        """Of all requests."""
        return added(self.services.values())

    @property
    def attainment(self) -> float:
        """Share of all requests that meet their goals."""
        return self.total.attainment

    @property
    def normalised_latency(self) -> float:
        """Mean over all answered requests."""
        return self.total.normalised_latency


class PlanEvaluator(Protocol):
    """Says how placements would fare; equal groups under equal traffic fare equally."""

    @property
    def services(self) -> Sequence[str]:
        """All services, placed or not."""
        ...

    def evaluate(self, placements: Sequence[Placement]) -> list[Estimate]:
        """Of each placement, in their order. Several at once may be computed in parallel."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What makes one placement better than another: first its attainment, then its latency (Algorithm 1)."""

    floor: float = 0.0
    """Attainment that every service is to have, before all else (Eq. 5); 0: none."""

    def key(self, estimate: Estimate) -> tuple[float, float, float]:
        """Larger is better."""
        short = 0.0
        if self.floor:
            short = sum(max(0.0, self.floor - each.attainment) for each in estimate.services.values())
        total = estimate.total
        return -short, total.attainment, -total.normalised_latency


@dataclass(frozen=True, slots=True)
class Found:
    """A placement and what is expected of it."""

    placement: Placement
    """Which services share which devices."""
    estimate: Estimate = field(repr=False)
    """By the evaluator that was asked."""


def best(found: Iterable[Found], objective: Objective) -> Found:
    """The best, the first of equals."""
    return max(found, key=lambda each: objective.key(each.estimate))
