"""Response body of /admin/placement: the present placement, the last interval, and what was decided."""

from msgspec import Struct

from shoal.cluster.placing.status import PlacingStatus, Proposal
from shoal.cluster.placing.traffic import IntervalFacts
from shoal.place.estimate import Estimate


class ServiceTraffic(Struct):
    """One service in an interval."""

    arrived: int
    ended: int
    """Without those that clients cancelled."""
    attainment: float
    """Share of these that met their goals; 1 if none ended."""
    mean_latency_s: float | None
    """Mean end-to-end latency of those that finished."""


class Estimated(Struct):
    """All services of a placement, estimated or as it came."""

    attainment: float
    normalised_latency: float
    """Mean latency, in times of a mean request of the service alone."""

    @classmethod
    def of(cls, estimate: Estimate | None) -> "Estimated | None":
        if estimate is None:
            return None
        return cls(round(estimate.attainment, 4), round(estimate.normalised_latency, 3))


class PlacementDecision(Struct):
    """The last interval of the policy, and what was decided at its end."""

    decided: float
    """In seconds since 1970."""
    length_s: float
    services: dict[str, ServiceTraffic]
    changes: bool
    why: str
    estimated: Estimated | None
    """What the search before had estimated for the interval; null: there was none."""
    achieved: Estimated | None
    """What it came to."""
    present: Estimated | None
    """Of the placement as it was, for the interval's requests; null without a search."""
    found: Estimated | None
    """Of the placement that was found, for the same."""
    search_s: float | None
    """How long the last search took."""
    learned: int
    """Pairs of a service and a kind of engine whose step times it fitted to steps as they ran."""


class PlacementProposal(Struct):
    """What the last search proposed for which an operator asked."""

    steps: list[str]
    """Empty: the placement should stay."""
    why: str
    requests: int
    """How many requests it was made for, ..."""
    window_s: float
    """... which came in this time."""
    present: Estimated | None
    """Of the placement as it was, for these requests."""
    found: Estimated | None
    """Of the best placement that was found, for the same."""

    @classmethod
    def of(cls, proposal: Proposal | None) -> "PlacementProposal | None":
        if proposal is None:
            return None
        return cls(
            [str(step) for step in proposal.steps],
            proposal.why,
            len(proposal.facts.requests),
            round(proposal.facts.window_s, 3),
            Estimated.of(proposal.present),
            Estimated.of(proposal.found),
        )


class PlacementChangeCard(Struct):
    """The last change, of the policy or an operator."""

    steps: list[str]
    outcome: str | None
    """``done``, or why it was given up; null: it is under way."""


class PlacementTable(Struct):
    """Response of /admin/placement."""

    placement: dict[str, list[str]]
    """Names of each service's engines."""
    policy: str
    """fixed or search."""
    interval_s: float | None
    """Length of the policy's present interval; null without one."""
    last: PlacementDecision | None
    """Null before the end of the first interval."""
    proposal: PlacementProposal | None
    """Null if no operator asked for one."""
    change: PlacementChangeCard | None
    """Null if there was none."""

    @classmethod
    def of(cls, placement: dict[str, list[str]], status: PlacingStatus) -> "PlacementTable":
        steps = [str(step) for step in status.steps]
        return cls(
            placement,
            status.policy,
            round(status.interval_s, 3) or None,
            _decision(status),
            PlacementProposal.of(status.proposal),
            PlacementChangeCard(steps, status.outcome) if steps else None,
        )


def _decision(status: PlacingStatus) -> PlacementDecision | None:
    facts, decision = status.facts, status.decision
    if facts is None or decision is None or status.decided_s is None:
        return None
    return PlacementDecision(
        decided=round(status.decided_s, 3),
        length_s=round(facts.length_s, 3),
        services=_traffic(facts),
        changes=decision.changes,
        why=decision.why,
        estimated=Estimated.of(decision.estimated),
        achieved=Estimated.of(decision.achieved),
        present=Estimated.of(decision.present),
        found=Estimated.of(decision.found),
        search_s=None if status.search_s is None else round(status.search_s, 3),
        learned=status.learned,
    )


def _traffic(facts: IntervalFacts) -> dict[str, ServiceTraffic]:
    return {
        name: ServiceTraffic(
            each.arrived,
            each.ended,
            round(each.attainment, 4),
            None if each.mean_latency_s is None else round(each.mean_latency_s, 3),
        )
        for name, each in facts.services.items()
    }
