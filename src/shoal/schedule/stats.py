"""Counts of what a scheduler did."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.forecast import Accuracy, Traffic


@dataclass(slots=True)
class Counters:
    """Running totals of one service; only the scheduler writes them."""

    finished: int = 0
    cancelled: int = 0
    evictions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    compacted_blocks: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    long_token_gaps: int = 0
    failed_steps: int = 0


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """One service so far.

    waiting, running: requests now. finished, cancelled: requests ended (those that failed or were refused
    count as cancelled). evictions: how often running requests lost their blocks; recomputed_tokens: tokens
    computed again because of it; swapped_tokens: tokens whose KV was saved on the host instead; swapped:
    requests waiting with KV saved there now. compacted_blocks: blocks copied to make merged blocks free.
    cached_tokens: prompt tokens found in the prefix index at first admissions, of prompt_tokens admitted.
    output_tokens: tokens delivered. long_token_gaps: ended requests with a gap between two tokens beyond
    ``max_token_gap``. failed_steps: steps that the executor could not complete. unfilled_tokens: room for so
    many tokens is left at the ends of the running requests' tables now.
    """

    waiting: int
    running: int
    finished: int
    cancelled: int
    evictions: int
    recomputed_tokens: int
    swapped_tokens: int
    compacted_blocks: int
    cached_tokens: int
    prompt_tokens: int
    output_tokens: int
    long_token_gaps: int
    failed_steps: int
    unfilled_tokens: int
    swapped: int


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
