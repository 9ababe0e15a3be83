"""``Scenario``: the settings of a simulation: services, step times, engines, KV pool, workload, incidents."""

from dataclasses import dataclass, field
from typing import Literal

from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.options import PackingOptions, check_batching, check_packing
from shoal.core import NO_GOALS, SLO, ConfigError
from shoal.core.cluster import Link as EngineLink
from shoal.execute.simulated import HOST_BYTES_PER_S
from shoal.forecast.latency_sources import Latency
from shoal.forecast.model_spec import ModelSpec
from shoal.schedule import SchedulerOptions
from shoal.schedule.weights_options import WeightsOptions, check_admission
from shoal.workload import WorkloadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioService:
    name: str
    model: ModelSpec | None = None
    """Shape of the model, and so of its KV; None: that of ``latency``, if it has one."""
    model_name: str | None = None
    """The model as written, or its absolute path, for the configuration of a server."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float8"] = "auto"
    """Data type of weights and KV; "auto": the model's own."""
    latency: Latency | None = None
    """Step times; None: the scenario's."""
    context_tokens: int | None = None
    """Maximum prompt and output together; None: what the pool holds."""
    slo: SLO = NO_GOALS
    """As in ``core.Service``."""
    execution_s: float | None = None
    """Time of its mean request when it runs alone; None: computed."""
    quota: int = 8
    """As in ``core.Service``."""
    starvation_s: float | None = None
    """As in ``core.Service``."""
    pin: bool = False
    """As in ``core.Service``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPool:
    """The KV pool of each engine; its size is in bytes, tokens or blocks, or follows from the device."""

    memory_bytes: int | None = None
    """Size on each device."""
    tokens: int | None = None
    blocks: int | None = None
    utilisation: float = 0.9
    """Fraction of the device memory for weights, KV and ``reserved_bytes``, if no size is given."""
    reserved_bytes: int = 0
    """Memory of each device for activations and other uses, if no size is given."""
    block_size: int = 16
    dtype: Literal["auto", "int8"] = "auto"
    """Data type of KV; "auto": that of the services."""
    layout: Literal["merged", "split"] | None = None
    """Layout of the pool; None: that of the preset."""
    swap_bytes: int | None = None
    """Swap space in host memory; None: four times the pool."""
    swap_bytes_per_s: float = HOST_BYTES_PER_S
    """Rate of swapping."""
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        sizes = {"memory": self.memory_bytes, "tokens": self.tokens, "blocks": self.blocks}
        given = [name for name, size in sizes.items() if size is not None]
        if len(given) > 1:
            raise ConfigError(f"the pool's size is written {len(given)} times: {', '.join(given)}; keep one")
        if self.tokens is not None and self.tokens < self.block_size:
            raise ConfigError(f"{self.tokens} tokens are less than one block of {self.block_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioWeights(WeightsOptions):
    """The memory for weights of each device, and what fetches cost.

    The bandwidth is that of the devices' data sheet, or ``bandwidth`` if that is less.
    """

    slowdown: float = 1.0
    """Duration of a step while weights come, relative to one without."""


LARGEST_ENGINES = 4096
"""Maximum engines of a simulation: each takes milliseconds to build, and memory for its blocks."""
SHORTEST_SAMPLE_S = 1e-3
INCIDENTS = {"drains": "be drained", "deaths": "die"}
"""Keys of incidents, and verbs for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """An engine is drained, or dies."""

    engine: int
    at_s: float
    """Time after the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All settings of a scenario file and flags."""

    workload: WorkloadOptions
    services: tuple[ScenarioService, ...] = (ScenarioService(name="default"),)
    latency: Latency | None = None
    """Step times of services without their own."""
    engines: int = 1
    """Number of replicas, each with all services and its own KV pool."""
    dispatch: str = "round-robin"
    """Dispatch policy, one of ``cluster.dispatch.DISPATCH_NAMES``."""
    packing: PackingOptions = field(default_factory=PackingOptions)
    """Options of migrations, if the dispatch policy is a packer."""
    batching: BatchingOptions | None = None
    """How batches are formed; None: each request is dispatched by itself."""
    fleet: FleetOptions | None = None
    """How many engines run; None: all."""
    link: EngineLink | None = None
    """Link of each engine for migrations; None: KV is not migrated."""
    drains: tuple[Incident, ...] = ()
    """Engines that get no more requests, and whose requests migrate."""
    deaths: tuple[Incident, ...] = ()
    load_s: float = 10.0
    """Time until an engine that died accepts requests again."""
    kv_cache: ScenarioPool = field(default_factory=ScenarioPool)
    weights: ScenarioWeights = field(default_factory=ScenarioWeights)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    preset: str = "shoal"
    """The preset that ``scheduler`` overrides."""
    sample_s: float = 1.0
    """Time between samples of the engines' state."""
    title: str = "simulation"

    def __post_init__(self) -> None:
        for name, what in INCIDENTS.items():
            for incident in getattr(self, name):
                if incident.engine >= self.engines:
                    raise ConfigError(unknown_engine_message(incident, what, self.engines))
        check_admission(self.weights, self.scheduler.admission)
        check_batching(self.batching, self.dispatch)
        check_packing(self.packing, self.dispatch)


def unknown_engine_message(incident: Incident, what: str, engines: int) -> str:
    """Error message for an incident of an engine that does not exist."""
    return f"engine {incident.engine} cannot {what}: there are {engines}, from 0"
