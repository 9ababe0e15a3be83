"""Estimates of placements (attainment, latency), their comparison, and the evaluator interface."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.place.placement import Placement

ALPHA = 1e-4
"""Weight of the normalised latency against one unserved request (SeaLLM, section 6.1)."""


@dataclass(frozen=True, slots=True)
class ServiceEstimate:
    """Estimate for one service, in requests of the given traffic."""

    requests: float
    unserved: float
    """Requests that miss their goals, or that no engine serves."""
    answered: float = 0.0
    """Requests that are answered, in time or not."""
    latency_sum: float = 0.0
    """Sum of their end-to-end latencies, each divided by the service's execution time L^."""

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
    """The sum over parts of a service's requests, or over services."""
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
    """Estimate for all services of a placement."""

    services: Mapping[str, ServiceEstimate]
    """By name, of all services, placed or not."""

    @property
    def total(self) -> ServiceEstimate:
        return added(self.services.values())

    @property
    def attainment(self) -> float:
        return self.total.attainment

    @property
    def normalised_latency(self) -> float:
        return self.total.normalised_latency


class PlanEvaluator(Protocol):
    """Estimates placements; equal groups under equal traffic get equal estimates."""

    @property
    def services(self) -> Sequence[str]: ...

    def evaluate(self, placements: Sequence[Placement]) -> list[Estimate]:
        """Estimates in the order of the placements, perhaps computed in parallel."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Comparison of placements: by attainment, then by latency (Algorithm 1)."""

    floor: float = 0.0
    """Minimum attainment of every service, as the first criterion (Eq. 5); 0: none."""

    def key(self, estimate: Estimate) -> tuple[float, float, float]:
        """Larger is better."""
        short = 0.0
        if self.floor:
            short = sum(max(0.0, self.floor - each.attainment) for each in estimate.services.values())
        total = estimate.total
        return -short, total.attainment, -total.normalised_latency


@dataclass(frozen=True, slots=True)
class Found:
    """A placement and its estimate."""

    placement: Placement
    estimate: Estimate = field(repr=False)


def best(found: Iterable[Found], objective: Objective) -> Found:
    """The best; the first of equals."""
    return max(found, key=lambda each: objective.key(each.estimate))
