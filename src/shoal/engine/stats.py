"""EngineStats: counters, queue lengths, KV pool usage and step times, for the wire and for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from shoal.core import StepResult
from shoal.engine.process_usage import ProcessUsage
from shoal.kvcache import PoolUsage
from shoal.schedule import stats
from shoal.schedule.stats import Observed, SchedulerStats


@dataclass(slots=True, kw_only=True)
class ServiceStats(stats.ServiceStats):
    """Scheduler counters of one service, and its part of the pool."""

    live_blocks: int = 0
    """Blocks in use."""
    cached_blocks: int = 0
    """Unused blocks that are kept for their prefix."""
    free_blocks: int = 0
    """Unused blocks in the service's merged blocks, which other services cannot use."""
    merged_blocks: int = 0
    """Merged blocks of the service."""
    block_bytes: int = 0
    """Bytes that a block takes from the pool, including padding."""
    observed: Observed | None = None
    """Recent traffic, and accuracy of the predicted output lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Present usage of the KV pool."""

    total_bytes: int
    live_bytes: int
    """Blocks in use."""
    cached_bytes: int
    """Unused blocks that are kept for their prefix."""
    padding_bytes: int
    """Padding of live blocks."""
    unfilled_bytes: int
    """Slots without KV in live blocks."""
    external_bytes: int
    """Free blocks that only the service holding their merged block can use."""
    merged_blocks: int
    free_merged_blocks: int
    """Merged blocks that belong to no service."""


@dataclass(slots=True, kw_only=True)
class StepTotals:
    """Time of all steps since the start, by activity."""

    count: int = 0
    schedule_ns: int = 0
    """Scheduling."""
    prepare_ns: int = 0
    """Input preparation, in the executor."""
    forward_ns: int = 0
    """Forward passes."""
    sample_ns: int = 0
    update_ns: int = 0
    """Output processing, in the scheduler."""
    reply_ns: int = 0
    """Passing on events, including detokenization in the same process."""

    def add(self, result: StepResult, update_ns: int) -> None:
        """Count an executed plan; each of its iterations is a step."""
        self.count += len(result.durations_ns)
        self.prepare_ns += result.timings.prepare_ns
        self.forward_ns += result.timings.forward_ns
        self.sample_ns += result.timings.sample_ns
        self.update_ns += update_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    services: Mapping[str, ServiceStats]
    pool: PoolStats
    steps: StepTotals
    usage: ProcessUsage | None = None
    """What its process uses of the machine; None: not measured."""

    @classmethod
    def collect(
        cls,
        scheduler: SchedulerStats,
        observed: Mapping[str, Observed],
        usage: PoolUsage,
        steps: StepTotals,
        block_size: int,
    ) -> Self:
        """A snapshot of scheduler counters, pool usage and step times."""
        services = {
            name: ServiceStats(
                **{field.name: getattr(counted, field.name) for field in fields(counted)},
                live_blocks=usage.services[name].live_blocks,
                cached_blocks=usage.services[name].cached_blocks,
                free_blocks=usage.services[name].free_blocks,
                merged_blocks=usage.services[name].merged_blocks,
                block_bytes=usage.services[name].block_bytes,
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
