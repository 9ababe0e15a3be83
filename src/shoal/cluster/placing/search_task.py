"""A search of placements for a running cluster: its input and its result, as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.cluster.manager.events import ServiceSpeed
from shoal.cluster.placing.traffic import ReplayedRequest
from shoal.core import NO_GOALS, SLO
from shoal.engine.step_samples import StepSample
from shoal.place.estimate import Estimate
from shoal.schedule import SchedulerOptions
from shoal.schedule.weights_options import WeightsOptions

ServicesByEngine = Mapping[str, frozenset[str]]
"""A placement of a running cluster: the services that each engine takes requests of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedEngine:
    """One engine, which is one group with its devices."""

    name: str
    kind: str
    """Engines of one kind are as fast as each other, and may have the same services."""
    kv_bytes: int
    services: frozenset[str]
    """Services that may be placed on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedService:
    """One service."""

    weights: str
    """Services with the same value share weights."""
    weight_bytes: int
    kv_token_bytes: int
    """KV bytes of a token."""
    context_tokens: int
    slo: SLO = NO_GOALS
    execution_s: float | None = None
    """L^ as configured; None: it is computed from the step times and the mean request."""
    quota: int = 8
    starvation_s: float | None = None
    """As in ``core.Service``, like ``quota``."""
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """What a search works on; can be pickled."""

    engines: Sequence[SearchedEngine]
    services: Mapping[str, SearchedService]
    present: ServicesByEngine
    requests: Sequence[ReplayedRequest]
    """By arrival."""
    window_s: float
    """How long they took to come."""
    steps: Mapping[tuple[str, str], Sequence[StepSample]] = field(default_factory=dict)
    """Steps as they ran, by service and kind of engine."""
    speeds: Mapping[tuple[str, str], ServiceSpeed] = field(default_factory=dict)
    """Speeds measured when services were loaded, likewise: step times where there are few steps."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    layout: str = "merged"
    block_size: int = 16
    weights: WeightsOptions = field(default_factory=WeightsOptions)
    """With a limit, weights take turns in it."""
    fetch_bytes_per_s: float = 16e9
    """Rate at which weights come to an engine, where there is a limit."""
    limit_s: float = 30.0
    """The search ends after this time with the best placement so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best placement found, and the present one, estimated on the same requests."""

    placement: ServicesByEngine
    """On the engines where the fewest weights are loaded."""
    estimate: Estimate
    present: Estimate
    execution_s: Mapping[str, float]
    """L^ by service, as the estimates use it."""
    load_bytes: int
    """Weights to load for the placement."""
    learned: frozenset[tuple[str, str]]
    """Services and kinds of engines whose step times were fitted to their steps."""
    took_s: float
    ended_early: bool
    """Whether the time was over before the search ended."""
