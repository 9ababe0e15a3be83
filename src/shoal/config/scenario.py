"""What a scenario says: services, how long their steps take, engines, and the workload that arrives."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.core import NO_GOALS, SLO, ConfigError
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.model_spec import ModelSpec
from shoal.schedule import SchedulerOptions
from shoal.simulate.spec import HOST_BYTES_PER_S
from shoal.workload import WorkloadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FitLatency:
    """Step times that ``shoal profile`` fitted.

    fit: the file that it wrote. service: whose times to take; None means those of the service's own name, or
    the only ones in the file. tp: devices that share the model.
    """

    fit: Path
    service: str | None = None
    tp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLatency:
    """Step times from tables of measured layers; the arguments are those of ``ProfileTimes.load``."""

    profile: Path
    tp: int = 1
    model: ModelSpec | None = None
    device: DeviceSpec | None = None
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineOptions:
    """A model on ``tp`` devices of one kind; model: None means the service's own."""

    device: DeviceSpec
    model: ModelSpec | None = None
    tp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineLatency:
    """Step times computed from data sheets."""

    roofline: RooflineOptions


Latency = FitLatency | ProfileLatency | RooflineLatency
"""Where step times come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioService:
    """One service of a scenario.

    model: its shape, which says how much memory KV takes; None takes that of the latency model, if it has
    one. dtype: of weights and KV; "auto" is the model's own. latency: None takes the scenario's.
    context_tokens: longest prompt and output together; None leaves it to the pool. slo, quota: as in
    ``core.Service``. execution_s: how long its mean request takes alone; None computes that.
    """

    name: str
    model: ModelSpec | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float8"] = "auto"
    latency: Latency | None = None
    context_tokens: int | None = None
    slo: SLO = NO_GOALS
    execution_s: float | None = None
    quota: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPool:
    """The KV pool of each engine, its size given in one way or not at all.

    memory_bytes: on each device. tokens, blocks: of KV. None of them: what ``utilisation`` of the device
    leaves beside the weights. layout: None takes the scheduler preset's. swap_bytes: host memory for the
    preempted KV; None takes four times the pool. swap_bytes_per_s: how fast that KV moves.
    """

    memory_bytes: int | None = None
    tokens: int | None = None
    blocks: int | None = None
    utilisation: float = 0.9
    block_size: int = 16
    layout: Literal["merged", "split"] | None = None
    swap_bytes: int | None = None
    swap_bytes_per_s: float = HOST_BYTES_PER_S
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Refuse two sizes; raises ConfigError."""
        sizes = {"memory": self.memory_bytes, "tokens": self.tokens, "blocks": self.blocks}
        given = [name for name, size in sizes.items() if size is not None]
        if len(given) > 1:
            raise ConfigError(f"the pool's size is written {len(given)} times: {', '.join(given)}; keep one")
        if self.tokens is not None and self.tokens < self.block_size:
            raise ConfigError(f"{self.tokens} tokens are less than one block of {self.block_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a scenario file and flags can say.

    latency: of services that have none of their own. engines: replicas, each with all services and a pool
    of its own. dispatch: which of them a request goes to; in ``DISPATCHES``. preset: the one that
    ``scheduler`` started from. sample_s: time between samples of the engines' state. title: for the head of
    a report.
    """

    workload: WorkloadOptions
    services: tuple[ScenarioService, ...] = (ScenarioService(name="default"),)
    latency: Latency | None = None
    engines: int = 1
    dispatch: str = "round-robin"
    kv_cache: ScenarioPool = field(default_factory=ScenarioPool)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    preset: str = "shoal"
    sample_s: float = 1.0
    title: str = "simulation"
