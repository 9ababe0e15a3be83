"""What a placement policy did last, for administration, metrics and the log."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.cluster.placing.change import Step
from shoal.cluster.placing.controller import Decision
from shoal.cluster.placing.traffic import IntervalFacts
from shoal.place.estimate import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a search proposed for which an operator asked."""

    facts: IntervalFacts
    """The traffic that it was made for."""
    steps: Sequence[Step]
    """The change; none: the placement should stay."""
    why: str
    present: Estimate
    """Of the present placement, for the requests of ``facts``."""
    found: Estimate
    """Of the best placement that was found, for the same."""


@dataclass(slots=True)
class PlacingStatus:
    """The last interval, what was decided at its end, and counters."""

    policy: str
    interval_s: float = 0.0
    """Length of the present interval; 0 without a policy that has any."""
    facts: IntervalFacts | None = None
    """Of the last interval."""
    decision: Decision | None = None
    """At its end."""
    decided_s: float | None = None
    """When, in seconds since 1970."""
    search_s: float | None = None
    """How long the last search took."""
    learned: int = 0
    """Pairs of a service and a kind of engine whose step times the last search fitted to their steps."""
    proposal: Proposal | None = None
    """The last that an operator asked for."""
    steps: Sequence[Step] = ()
    """Of the last change."""
    outcome: str | None = None
    """How that change ended: ``done``, or why it was abandoned; None: it is under way, or there was none."""
    searches: dict[str, int] = field(default_factory=lambda: {"done": 0, "failed": 0})
    """By outcome."""
    changes: dict[str, int] = field(default_factory=lambda: {"done": 0, "abandoned": 0})
    """By outcome, of the policy and of operators."""
