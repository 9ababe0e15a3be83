"""Counts of what a scheduler did."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shoal.forecast import Accuracy, Traffic


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals of one service; only the scheduler writes them."""

    finished: int = 0
    """Requests finished so far."""
    cancelled: int = 0
    """Requests cancelled, refused or failed so far."""
    preemptions: int = 0
    """Preemptions so far."""
    recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""
    swapped_tokens: int = 0
    """Tokens whose KV was saved on the host at preemptions."""
    compacted_blocks: int = 0
    """Blocks copied to free merged blocks."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix index at first admissions."""
    prompt_tokens: int = 0
    """Prompt tokens of all admitted requests."""
    output_tokens: int = 0
    """Output tokens delivered so far."""
    long_token_gaps: int = 0
    """Ended requests with a gap between two tokens beyond ``scheduler.max_token_gap``."""
    failed_steps: int = 0
    """Steps that the executor could not complete."""

    def totals(self) -> dict[str, int]:
        """All of them by name."""
        return {field.name: getattr(self, field.name) for field in fields(Counters)}


@dataclass(slots=True, kw_only=True)
class ServiceStats(Counters):
    """One service: a copy of its counters, and its present state."""

    waiting: int = 0
    """Requests that wait now."""
    running: int = 0
    """Requests that run now."""
    swapped: int = 0
    """Waiting requests whose KV is saved on the host."""
    unfilled_tokens: int = 0
    """Empty slots in the last blocks of running requests."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """All services by name, and how many plans were made."""

    services: Mapping[str, ServiceStats]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the scheduler has learned of a service, made only when asked for.

    traffic: its requests of late. accuracy: how often the length predictor foresaw the right bucket, and
    corrections: how often a request outgrew its prediction since the start; None unless it is ``learned``.
    """

    traffic: Traffic
    accuracy: Accuracy | None = None
    corrections: int | None = None
