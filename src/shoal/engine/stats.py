"""What an engine counts, as plain values that travel over the wire and into metrics."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Self

from shoal.core import StepResult
from shoal.kvcache import PoolUsage
from shoal.schedule.stats import Observed, SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStats:
    """One service.

    Counters since the start: finished and cancelled requests, evictions, recomputed_tokens (computed again
    after evictions), swapped_tokens (saved on the host at evictions), compacted_blocks (copied to make merged
    blocks free), prompt_tokens, cached_tokens (of them found in the prefix index) and output_tokens.
    Now: waiting and running requests; swapped: those of the waiting whose KV is saved on the host;
    unfilled_tokens: slots for tokens at the ends of running requests' last blocks that hold none yet. live,
    cached and free blocks lie in the merged blocks that the service holds: in use, kept for their prefix,
    and unused but out of other services' reach. observed: its traffic of late, and how well its output
    lengths were foreseen.
    """

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    finished: int = 0
    cancelled: int = 0
    evictions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    compacted_blocks: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    unfilled_tokens: int = 0
    live_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    merged_blocks: int = 0
    observed: Observed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """The KV pool now.

    live_bytes: of blocks in use; cached_bytes: of blocks kept for their prefix. padding_bytes: what
    live blocks take beyond their KV. unfilled_bytes: of slots in live blocks that hold no KV yet.
    external_bytes: of free blocks that only the service holding
    their merged block can use.
    """

    total_bytes: int
    live_bytes: int
    cached_bytes: int
    padding_bytes: int
    unfilled_bytes: int
    external_bytes: int
    merged_blocks: int
    free_merged_blocks: int


@dataclass(slots=True, kw_only=True)
class StepTotals:
    """Where the time of all steps went, in nanoseconds since the start.

    schedule, update: the scheduler's halves of a step. prepare, forward, sample: the executor's parts.
    reply: handing events on, with detokenising where that is done in the same process.
    """

    count: int = 0
    schedule_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    update_ns: int = 0
    reply_ns: int = 0

    def add(self, result: StepResult, update_ns: int) -> None:
        """Count an executed plan: each of its iterations is a step."""
        self.count += len(result.durations_ns)
        self.prepare_ns += result.timings.prepare_ns
        self.forward_ns += result.timings.forward_ns
        self.sample_ns += result.timings.sample_ns
        self.update_ns += update_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Everything an engine counts."""

    services: Mapping[str, ServiceStats]
    pool: PoolStats
    steps: StepTotals

    @classmethod
    def collect(
        cls,
        scheduler: SchedulerStats,
        observed: Mapping[str, Observed],
        usage: PoolUsage,
        steps: StepTotals,
        block_size: int,
    ) -> Self:
        """A snapshot of the scheduler's counters and beliefs, the pool and the step times."""
        services = {
            name: ServiceStats(
                **asdict(counted),
                live_blocks=usage.services[name].live_blocks,
                cached_blocks=usage.services[name].cached_blocks,
                free_blocks=usage.services[name].free_blocks,
                merged_blocks=usage.services[name].merged_blocks,
                observed=observed[name],
            )
            for name, counted in scheduler.services.items()
        }
        pool = PoolStats(
            total_bytes=usage.total_bytes,
            live_bytes=usage.live_bytes,
            cached_bytes=sum(used.cached_blocks * used.block_bytes for used in usage.services.values()),
            padding_bytes=sum(
                used.live_blocks * (used.block_bytes - block_size * used.token_bytes)
                for used in usage.services.values()
            ),
            unfilled_bytes=sum(
                counted.unfilled_tokens * usage.services[name].token_bytes
                for name, counted in scheduler.services.items()
            ),
            external_bytes=usage.external_bytes(),
            merged_blocks=usage.capacity,
            free_merged_blocks=usage.free_merged,
        )
        return cls(services=services, pool=pool, steps=replace(steps))
