"""The parts of a simulation: engines, their services, and what is recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.cluster.manager.events import MoveMethod
from shoal.cluster.options import PackingOptions
from shoal.core import NO_GOALS, SLO, ConfigError
from shoal.core.cluster import Link
from shoal.execute.simulated import SimulatedModel
from shoal.forecast import StepTimes
from shoal.kvcache import KVShape, LayerShape, PoolLayout, plan_layout
from shoal.schedule import SchedulerOptions, ServiceLimits

HOST_BYTES_PER_S = 16e9
"""Default rate between device and host memory: about PCIe 4 with 16 lanes, as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One service on one engine."""

    times: StepTimes
    """How long steps of its model take there."""
    context_tokens: int = 1 << 20
    """The model's context limit."""
    slo: SLO = NO_GOALS
    """As in ``core.Service``."""
    execution_s: float | None = None
    """As in ``core.Service``."""
    quota: int = 8
    """As in ``core.Service``."""
    weights: str | None = None
    """Services for which it is the same run on the same weights; None: it has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine."""

    services: Mapping[str, ServiceSpec]
    """Its services by name."""
    layout: PoolLayout
    """Of its pool of KV blocks."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    """Its scheduler's options."""
    host: PoolLayout | None = None
    """Of the pool for swapped KV; needed only if preempted requests are swapped."""
    host_bytes_per_s: float = HOST_BYTES_PER_S
    """How fast KV is copied between the pools."""
    prefix_caching: bool = True
    """As in the real engine."""

    def __post_init__(self) -> None:
        """Reject a pool for other services; raises ConfigError."""
        if set(self.services) != set(self.layout.services):
            raise ConfigError(
                f"the engine serves {', '.join(sorted(self.services))}, but its KV pool is for "
                f"{', '.join(sorted(self.layout.services))}"
            )

    @property
    def limits(self) -> dict[str, ServiceLimits]:
        """What its scheduler knows of the services."""
        return {
            name: ServiceLimits(
                service.context_tokens,
                slo=service.slo,
                execution_s=service.execution_s,
                quota=service.quota,
                weights=service.weights,
            )
            for name, service in self.services.items()
        }

    @property
    def models(self) -> dict[str, SimulatedModel]:
        """What its executor knows of them."""
        return {
            name: SimulatedModel(
                times=service.times,
                copy_s=self.layout.services[name].held_block_bytes / self.host_bytes_per_s,
            )
            for name, service in self.services.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """Engines that die, and how soon they are back."""

    times: Sequence[tuple[float, int]] = ()
    """(seconds from the start, number of the engine) of each death. One that waits to be started again does
    not die; one that loads begins anew."""
    load_s: float = 10.0
    """How long an engine loads once it is started again; when that is, ``ClusterOptions`` say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """Running requests that go to other engines, and how fast their KV does."""

    link: Link | None = None
    """Of each engine, for either direction; None: KV stays where it is, and is computed anew elsewhere."""
    drains: Sequence[tuple[float, int]] = ()
    """(seconds from the start, number of the engine) of engines that get no new requests from then on, and
    whose requests leave them."""
    wanted: Sequence[tuple[float, str, int | None, MoveMethod]] = ()
    """(seconds from the start, request, number of the engine to which it goes or None for whichever the
    dispatch chooses, how). One that is not running then stays as it is."""
    packing: PackingOptions = field(default_factory=PackingOptions)
    """How a packer that is the dispatch moves requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a simulation runs and what it records. No option changes what happens in it."""

    skip_ahead: bool = True
    """Simulate runs of decode steps at once."""
    sample_s: float = 1.0
    """Seconds between samples of the engines' state."""
    spans: bool = False
    """Record every step, for a timeline."""

    def __post_init__(self) -> None:
        """Reject an interval of no length; raises ConfigError."""
        if not self.sample_s >= 1e-6:
            raise ConfigError(f"samples must be at least a microsecond apart, got {self.sample_s} s")


def token_layout(blocks: int, block_size: int = 16, *services: str) -> PoolLayout:
    """A pool of ``blocks`` KV blocks for services with blocks of equal size, of arbitrary bytes."""
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
