"""Scheduler statistics: counters by service, current queue lengths, observed traffic."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shoal.forecast import Accuracy, Traffic
from shoal.schedule.policies.residency import Place


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals of one service; only the scheduler writes them."""

    finished: int = 0
    cancelled: int = 0
    """Requests cancelled, refused or failed."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""
    swapped_tokens: int = 0
    """Tokens whose KV was saved on the host at preemptions."""
    compacted_blocks: int = 0
    """Blocks moved by compactions."""
    cached_tokens: int = 0
    """Prefix cache hits at first admissions."""
    prompt_tokens: int = 0
    """Prompt tokens of all admitted requests."""
    output_tokens: int = 0
    long_token_gaps: int = 0
    """Ended requests with an inter-token latency beyond ``scheduler.max_token_gap``."""
    failed_steps: int = 0
    """Steps that the executor could not complete."""

    def totals(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(Counters)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsStats:
    """Where the weights of a service are, and totals; equal for services that share weights."""

    name: str
    place: Place
    num_bytes: int
    pinned: bool
    fetches: int
    """Fetches begun; failed ones count."""
    evictions: int
    fetching_s: float
    """Total duration of the fetches."""
    waits: int
    """How often a request waited for the weights, until they came."""
    waiting_s: float
    """Total duration of these waits."""
    longest_wait_s: float


@dataclass(slots=True, kw_only=True)
class ServiceStats(Counters):
    """Counters and current state of one service."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    """Waiting requests whose KV is saved on the host."""
    unfilled_tokens: int = 0
    """Empty token slots in the blocks of running requests."""
    weights: WeightsStats | None = None
    """None: all weights stay in the device's memory."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Statistics by service, and the number of planned steps."""

    services: Mapping[str, ServiceStats]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Recent traffic of a service, and the quality of its length predictions.

    accuracy: share of predictions in the right bucket. corrections: how often a request outgrew its
    prediction since the start. Both are None unless the predictor is ``learned``.
    """

    traffic: Traffic
    accuracy: Accuracy | None = None
    corrections: int | None = None
