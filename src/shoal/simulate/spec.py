"""Input of a simulation: engines, services, deaths, migrations, and what to record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.options import PackingOptions
from shoal.core import NO_GOALS, SLO, ConfigError
from shoal.core.cluster import Link
from shoal.execute.fetch_link import FetchTimes
from shoal.execute.simulated import HOST_BYTES_PER_S, SimulatedModel
from shoal.forecast import StepTimes
from shoal.kvcache import KVShape, LayerShape, PoolLayout, plan_layout
from shoal.schedule import SchedulerOptions, ServiceLimits
from shoal.schedule.weights_options import WeightsOptions, check_admission


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One service on one engine."""

    times: StepTimes
    """Step times of its model there."""
    context_tokens: int = 1 << 20
    slo: SLO = NO_GOALS
    """As in ``core.Service``."""
    execution_s: float | None = None
    """As in ``core.Service``."""
    quota: int = 8
    """As in ``core.Service``."""
    starvation_s: float | None = None
    """As in ``core.Service``."""
    weights: str | None = None
    """Services with the same value share weights; None: its own."""
    weight_bytes: int = 0
    """Size of its weights on each device."""
    pinned: bool = False
    """As ``core.Service.pin``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine."""

    services: Mapping[str, ServiceSpec]
    layout: PoolLayout
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    host: PoolLayout | None = None
    """Of the pool for swapped KV; needed only for preemption by swapping."""
    host_bytes_per_s: float = HOST_BYTES_PER_S
    """Rate of KV copies between the pools."""
    prefix_caching: bool = True
    weights: WeightsOptions = field(default_factory=WeightsOptions)
    fetch_bytes_per_s: float | None = None
    """Rate of the link on which weights come to each device, apart from ``weights.bandwidth``."""
    fetch_slowdown: float = 1.0
    """As ``FetchTimes.slowdown``."""
    abort_gap_s: float | None = None
    """A request is cancelled at a token that comes more than this after its last one, as LightLLM can do;
    None: never."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a pool of other services, and for weights that cannot be fetched."""
        if set(self.services) != set(self.layout.services):
            raise ConfigError(
                f"the engine serves {', '.join(sorted(self.services))}, but its KV pool is for "
                f"{', '.join(sorted(self.layout.services))}"
            )
        check_admission(self.weights, self.scheduler.admission)
        if self.weights.memory_bytes is None:
            return
        if self.fetch_bytes_per_s is None and self.weights.bandwidth is None:
            raise ConfigError("weights.memory: nothing says how fast weights come; write weights.bandwidth")
        if unknown := [name for name, service in self.services.items() if not service.weight_bytes]:
            raise ConfigError(f"weights.memory: the size of the weights of {', '.join(unknown)} is not known")
        if not self.fetch_slowdown >= 1:
            raise ConfigError(f"fetch_slowdown must be at least 1, got {self.fetch_slowdown}")

    @property
    def limits(self) -> dict[str, ServiceLimits]:
        return {
            name: ServiceLimits(
                service.context_tokens,
                slo=service.slo,
                execution_s=service.execution_s,
                quota=service.quota,
                starvation_s=service.starvation_s,
                weights=service.weights,
                weight_bytes=service.weight_bytes,
                pinned=service.pinned,
            )
            for name, service in self.services.items()
        }

    @property
    def fetch_times(self) -> FetchTimes:
        """Of the weights of all services; none if they never leave."""
        if self.weights.memory_bytes is None:
            return FetchTimes()
        rate = min(filter(None, (self.fetch_bytes_per_s, self.weights.bandwidth)))
        seconds = {
            name if service.weights is None else service.weights: service.weight_bytes / rate
            for name, service in self.services.items()
        }
        return FetchTimes(seconds=seconds, slowdown=self.fetch_slowdown)

    @property
    def models(self) -> dict[str, SimulatedModel]:
        return {
            name: SimulatedModel(
                times=service.times,
                copy_s=self.layout.services[name].held_block_bytes / self.host_bytes_per_s,
            )
            for name, service in self.services.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaths:
    """Deaths of engines, and their loading time."""

    times: Sequence[tuple[float, int]] = ()
    """(seconds from the start, number of the engine) of each death. A death is ignored while its engine waits
    for
    a restart; a loading engine starts again."""
    load_s: float = 10.0
    """Loading time after a restart; ``ClusterOptions`` has the delay before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSpec:
    """Migrations of running requests, and the links for their KV."""

    link: Link | None = None
    """Of each engine, for either direction; None: KV is not sent but recomputed."""
    drains: Sequence[tuple[float, int]] = ()
    """(seconds from the start, number of the engine): when engines are drained."""
    wanted: Sequence[tuple[float, str, int | None, MigrationMethod]] = ()
    """(seconds from the start, request, number of the destination or None for the choice of the dispatch
    policy,
    method). Ignored if the request is not running then."""
    packing: PackingOptions = field(default_factory=PackingOptions)
    """If the dispatch policy is a packer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a simulation runs and what it records; no option changes its result."""

    skip_ahead: bool = True
    """Whether runs of decode steps are computed at once."""
    sample_s: float = 1.0
    """Interval between samples of the engines' state."""
    spans: bool = False
    """Whether every step is recorded, for a timeline."""

    def __post_init__(self) -> None:
        """Raises ConfigError for an interval of no length."""
        if not self.sample_s >= 1e-6:
            raise ConfigError(f"samples must be at least a microsecond apart, got {self.sample_s} s")


def token_layout(blocks: int, block_size: int = 16, *services: str) -> PoolLayout:
    """A pool of ``blocks`` KV blocks for services with equal block sizes, of arbitrary bytes."""
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
