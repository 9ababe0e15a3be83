"""EngineOptions: services, device, memory and policies of one engine, and their checks."""

from dataclasses import dataclass, field

from shoal.core import ConfigError, Service, service_problem, slo_problem
from shoal.core.slo import LONGEST_GOAL_S
from shoal.forecast.latency_sources import EngineLatency
from shoal.kvcache.options import KV_DTYPES, KVCacheOptions
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.weights_options import WeightsOptions, check_admission

# More than any machine has; each takes memory.
_MAX_THREADS = 1024
SIMULATED = "simulated"
"""The device of engines whose steps take time and compute nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of one engine.

    device: "cpu", "cuda", "cuda:N" or "simulated". latency: of a simulated device. threads: CPU threads of
    the engine; None: every core that the process may use. attention: name of an attention backend; "auto":
    the fastest that is supported. max_queue: maximum requests waiting for their first token; further requests
    are rejected (served engines only; offline queues have no limit). memory_share: the engine's part of the
    default memory, where several engines share a device.
    """

    services: tuple[Service, ...]
    device: str = "cpu"
    latency: EngineLatency | None = None
    kv_cache: KVCacheOptions = field(default_factory=KVCacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    weights: WeightsOptions = field(default_factory=WeightsOptions)
    threads: int | None = None
    attention: str = "auto"
    max_queue: int = 1024
    memory_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.services:
            raise ConfigError("an engine needs at least one service; name a model, such as smollm2")
        names = [service.name for service in self.services]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"service names must differ, but {', '.join(repeated)} is used more than once")
        for service in self.services:
            _check_service(service)
        self._check_latency()
        self._check_kv_dtype()
        check_admission(self.weights, self.scheduler.admission)
        if self.threads is not None and not 1 <= self.threads <= _MAX_THREADS:
            raise ConfigError(f"threads must be 1 to {_MAX_THREADS}, got {self.threads}")
        if self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, got {self.max_queue}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share must be above 0 and at most 1, got {self.memory_share}")

    def _check_latency(self) -> None:
        if self.device == SIMULATED and self.latency is None:
            raise ConfigError(
                "device simulated: nothing says how long its steps take; write as latency the name of a "
                "device, such as h100, or a file of `shoal profile`; as a flag --device simulated:h100"
            )
        if self.device != SIMULATED and self.latency is not None:
            raise ConfigError(f"latency is of simulated devices only, and device is {self.device}")
        if self.latency is not None:
            for service in self.services:
                self.latency.of(service.name)

    def _check_kv_dtype(self) -> None:
        dtype = self.kv_cache.dtype
        if dtype not in KV_DTYPES:
            raise ConfigError(f"kv_cache dtype {dtype!r} is not known; possible are {', '.join(KV_DTYPES)}")
        if dtype == "int8" and self.device not in ("cpu", SIMULATED):
            raise ConfigError(
                f"kv_cache dtype int8 is for CPUs only, and device is {self.device}; write dtype auto"
            )


def _check_service(service: Service) -> None:
    """Raise ConfigError for values out of range."""
    if service.execution_s is not None and not 0 < service.execution_s <= LONGEST_GOAL_S:
        raise ConfigError(
            f"execution_s of service {service.name} must be more than 0 and at most {LONGEST_GOAL_S:g} "
            f"seconds, got {service.execution_s}"
        )
    if service.quota < 1:
        raise ConfigError(f"quota of service {service.name} must be at least 1, got {service.quota}")
    if service.starvation_s is not None and not service.starvation_s > 0:
        raise ConfigError(
            f"starvation of service {service.name} must be above 0 seconds, got {service.starvation_s}"
        )
    if found := slo_problem(service.slo, service.execution_s):
        goal, wrong = found
        raise ConfigError(f"service {service.name}: slo.{goal} {wrong}")
    if found := service_problem(service):
        key, wrong = found
        raise ConfigError(f"service {service.name}: {key} {wrong}")
