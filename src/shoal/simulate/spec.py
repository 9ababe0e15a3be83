"""What a simulation is made of: engines, their services, and how closely it is watched."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core import NO_GOALS, SLO, ConfigError
from shoal.forecast import StepTimes
from shoal.kvcache import KVShape, LayerShape, PoolLayout, plan_layout
from shoal.schedule import SchedulerOptions

HOST_BYTES_PER_S = 16e9
"""Between device and host memory, unless a spec says otherwise: about PCIe 4 with 16 lanes, as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One service on one engine.

    times: how long steps of its model take there. context_tokens: of the model. slo, execution_s, quota: as
    in ``core.Service``.
    """

    times: StepTimes
    context_tokens: int = 1 << 20
    slo: SLO = NO_GOALS
    execution_s: float | None = None
    quota: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine: its services by name, its scheduler, and its pool of KV blocks.

    host: layout of the pool for swapped KV; needed, and used, only where victims are swapped.
    host_bytes_per_s: how fast KV moves between the pools. prefix_caching: as in the real engine.
    """

    services: Mapping[str, ServiceSpec]
    layout: PoolLayout
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    host: PoolLayout | None = None
    host_bytes_per_s: float = HOST_BYTES_PER_S
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Refuse a pool for other services; raises ConfigError."""
        if set(self.services) != set(self.layout.services):
            raise ConfigError(
                f"the engine serves {', '.join(sorted(self.services))}, but its KV pool is for "
                f"{', '.join(sorted(self.layout.services))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a simulation runs and what it keeps. None of it changes what happens.

    skip_ahead: take runs of decode steps at once. sample_s: seconds between samples of the engines' state.
    spans: keep every step, for a timeline.
    """

    skip_ahead: bool = True
    sample_s: float = 1.0
    spans: bool = False

    def __post_init__(self) -> None:
        """Refuse samples at no distance; raises ConfigError."""
        if not self.sample_s >= 1e-6:
            raise ConfigError(f"samples must be at least a microsecond apart, got {self.sample_s} s")


def token_layout(blocks: int, block_size: int = 16, *services: str) -> PoolLayout:
    """A pool of ``blocks`` KV blocks for services with blocks of equal size; their bytes mean nothing."""
    shape = KVShape("bfloat16", (LayerShape(1, 64, 64),))
    names = services or ("default",)
    layout = plan_layout(
        dict.fromkeys(names, shape),
        memory_bytes=blocks * shape.block_bytes(block_size),
        block_size=block_size,
        kind="merged",
    )
    if layout.merged_blocks != blocks:
        raise ConfigError(f"a pool of {blocks} blocks of {block_size} tokens cannot be laid out")
    return layout
