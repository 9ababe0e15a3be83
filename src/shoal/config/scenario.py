"""What a scenario says: services, how long their steps take, engines, and the workload that arrives."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.cluster.options import PackingOptions
from shoal.core import NO_GOALS, SLO, ConfigError
from shoal.core.cluster import Link as EngineLink
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.overhead import NO_OVERHEAD, HostOverhead
from shoal.forecast.roofline_ops import Link
from shoal.schedule import SchedulerOptions
from shoal.simulate.spec import HOST_BYTES_PER_S
from shoal.workload import WorkloadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FitLatency:
    """Step times that ``shoal profile`` fitted."""

    fit: Path
    """The file that it wrote."""
    service: str | None = None
    """Whose times to take; None: those of the service's own name, or the only ones in the file."""
    tp: int = 1
    """Devices that share the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLatency:
    """Step times from tables of measured layers."""

    profile: Path
    """The folder of the tables."""
    tp: int = 1
    """Devices that share the model."""
    model: ModelSpec | None = None
    """Whose layers are counted; None: the service's model, or the one that the folder names."""
    device: DeviceSpec | None = None
    """One of the devices; None: the one that the folder names."""
    link: Link | None = None
    """Between the devices; None: as measured, or that of the device."""
    overhead: HostOverhead = NO_OVERHEAD
    """What the host adds."""
    data_parallel: int = 1
    """Ranks, each with a device and a pool of its own, that divide the experts of every layer among them and
    step together."""
    expert_imbalance: float = 1.0
    """With ranks: tokens that the busiest one's experts compute, in units of an even share."""

    def __post_init__(self) -> None:
        """Refuse both ways to divide a model; raises ConfigError."""
        if self.data_parallel > 1 and self.tp > 1:
            raise ConfigError("ranks of several devices (data_parallel and tp above 1) cannot be simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineOptions:
    """A model on devices of one kind."""

    device: DeviceSpec
    """Data sheet of one of them."""
    model: ModelSpec | None = None
    """Its shape; None: that of the service's model."""
    tp: int = 1
    """Devices that share the model."""
    link: Link | None = None
    """Between the devices; None: that of the data sheet."""
    overhead: HostOverhead = NO_OVERHEAD
    """What the host adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineLatency:
    """Step times computed from data sheets."""

    roofline: RooflineOptions
    """Model and devices."""


Latency = FitLatency | ProfileLatency | RooflineLatency
"""Where step times come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioService:
    """One service of a scenario."""

    name: str
    """What requests ask for."""
    model: ModelSpec | None = None
    """Its shape, which says how much memory KV takes; None: that of ``latency``, if it has one."""
    model_name: str | None = None
    """The model as it was written, a path from the root: what a server may find it by."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float8"] = "auto"
    """Of weights and KV; "auto": the model's own."""
    latency: Latency | None = None
    """Its step times; None: the scenario's."""
    context_tokens: int | None = None
    """Longest prompt and output together; None: what the pool holds."""
    slo: SLO = NO_GOALS
    """As in ``core.Service``."""
    execution_s: float | None = None
    """How long its mean request takes alone; None: that is computed."""
    quota: int = 8
    """As in ``core.Service``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPool:
    """The KV pool of each engine, its size given in one way or not at all."""

    memory_bytes: int | None = None
    """Its size on each device."""
    tokens: int | None = None
    """Its size in tokens of KV."""
    blocks: int | None = None
    """Its size in blocks of KV."""
    utilisation: float = 0.9
    """Share of a device for weights, KV and what is reserved, where no size is given."""
    reserved_bytes: int = 0
    """Memory of each device for activations and whatever else is neither weights nor KV, where no size is
    given."""
    block_size: int = 16
    """Tokens in a block."""
    dtype: Literal["auto", "int8"] = "auto"
    """What KV is stored as; "auto": as the services say."""
    layout: Literal["merged", "split"] | None = None
    """How the pool is cut up; None: as the scheduler's preset says."""
    swap_bytes: int | None = None
    """Host memory for preempted KV; None: four times the pool."""
    swap_bytes_per_s: float = HOST_BYTES_PER_S
    """How fast that KV moves."""
    prefix_caching: bool = True
    """Whether KV is kept for requests that begin with the same tokens."""

    def __post_init__(self) -> None:
        """Refuse two sizes; raises ConfigError."""
        sizes = {"memory": self.memory_bytes, "tokens": self.tokens, "blocks": self.blocks}
        given = [name for name, size in sizes.items() if size is not None]
        if len(given) > 1:
            raise ConfigError(f"the pool's size is written {len(given)} times: {', '.join(given)}; keep one")
        if self.tokens is not None and self.tokens < self.block_size:
            raise ConfigError(f"{self.tokens} tokens are less than one block of {self.block_size}")


LARGEST_ENGINES = 4096
"""Most engines of a simulation: each takes milliseconds to build, and memory for its blocks."""
SHORTEST_SAMPLE_S = 1e-3
INCIDENTS = {"drains": "be drained", "deaths": "die"}
"""What may happen to engines: keys, and what an engine cannot do that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something happens to an engine."""

    engine: int
    """Its number, from 0."""
    at_s: float
    """When, from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a scenario file and flags can say."""

    workload: WorkloadOptions
    """What arrives."""
    services: tuple[ScenarioService, ...] = (ScenarioService(name="default"),)
    """Those of every engine."""
    latency: Latency | None = None
    """Step times of services that have none of their own."""
    engines: int = 1
    """Replicas, each with all services and a pool of its own."""
    dispatch: str = "round-robin"
    """Which engine a request goes to; in ``cluster.dispatch.DISPATCH_NAMES``."""
    packing: PackingOptions = field(default_factory=PackingOptions)
    """How a packer that is the dispatch moves requests."""
    link: EngineLink | None = None
    """Of each engine, over which KV goes to others; None: none does."""
    drains: tuple[Incident, ...] = ()
    """Engines that get no more requests, and that theirs leave."""
    deaths: tuple[Incident, ...] = ()
    """Engines that die."""
    load_s: float = 10.0
    """How long an engine that died loads before it takes requests again."""
    kv_cache: ScenarioPool = field(default_factory=ScenarioPool)
    """The pool of each engine."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    """The scheduler of each engine."""
    preset: str = "shoal"
    """The preset that ``scheduler`` started from."""
    sample_s: float = 1.0
    """Time between samples of the engines' state."""
    title: str = "simulation"
    """For the head of a report."""

    def __post_init__(self) -> None:
        """Refuse incidents of engines that are not there; raises ConfigError."""
        for name, what in INCIDENTS.items():
            for incident in getattr(self, name):
                if incident.engine >= self.engines:
                    raise ConfigError(no_engine(incident, what, self.engines))


def no_engine(incident: Incident, what: str, engines: int) -> str:
    """That an engine cannot have an incident, as there are only so many."""
    return f"engine {incident.engine} cannot {what}: there are {engines}, from 0"
