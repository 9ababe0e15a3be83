"""Status of engines, services and requests, for health, metrics, administration and the page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shoal.cluster.manager.actions import MigrationOutcome
from shoal.cluster.manager.events import MigrationMethod
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.stats import EngineStats
from shoal.frontend.timeline import PhaseBegin
from shoal.schedule.policies.residency import Place
from shoal.schedule.stats import WeightsStats


class EngineState(StrEnum):
    """Life cycle of an engine."""

    WAITING = "waiting"
    """It ended and waits for its restart."""
    LOADING = "loading"
    READY = "ready"
    """It accepts requests."""
    DRAINING = "draining"
    """It gets no new requests; its own migrate to other engines, or finish."""
    STANDBY = "standby"
    """It is declared, but does not run, and starts when it is activated."""


class ServiceState(StrEnum):
    """Life cycle of a service."""

    PULLING = "pulling"
    """Its model is being downloaded."""
    LOADING = "loading"
    """Engines are loading it, and none has it yet."""
    READY = "ready"
    """At least one engine accepts its requests."""
    DRAINING = "draining"
    """It is to be unloaded, but still has requests or weights."""
    UNLOADED = "unloaded"
    """No engine has it; a request loads it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine: what the manager knows, then what the router knows of its process."""

    name: str
    state: EngineState
    services: tuple[str, ...]
    """Including services that are still loading."""
    unplaced: tuple[str, ...] = ()
    """Services of these that it takes no new requests of."""
    deactivating: bool = False
    """Whether it drains to go to standby."""
    stopping: bool = False
    """Whether its process is ended for that; an engine that is activated meanwhile starts again."""
    incarnation: int = 0
    """How often it was started."""
    restarts: int = 0
    requests: int = 0
    """Unfinished requests."""
    leases: int = 0
    """Migrating requests for which it keeps KV blocks: they arrive, or may return."""
    migrations: Mapping[tuple[MigrationMethod, MigrationOutcome], int] = field(default_factory=dict)
    """Finished migrations from it."""
    withdrawn: int = 0
    """Requests that a packer withdrew from it because no engine had room."""
    last_error: str | None = None
    device: str = ""
    pid: int | None = None
    heartbeat_age_s: float | None = None
    """Time since its last heartbeat; None: none has come."""
    info: EngineInfo | None = None
    """As of the last time that it became ready."""
    stats: EngineStats | None = None
    """Its latest counters and gauges, kept when it dies."""
    stats_age_s: float = 0.0
    """Age of ``stats``."""
    weights_memory_bytes: int | None = None
    """Limit on the bytes of weights in its memory; None: all weights stay there."""

    @property
    def placed(self) -> tuple[str, ...]:
        """Services that it takes requests of while it is ready."""
        return tuple(name for name in self.services if name not in self.unplaced)

    @property
    def active(self) -> bool:
        """Whether it takes requests, or will once it runs."""
        return self.state not in (EngineState.DRAINING, EngineState.STANDBY)

    @property
    def runs(self) -> bool:
        """Whether its process has loaded, and runs."""
        return self.state in (EngineState.READY, EngineState.DRAINING)

    def place(self, service: str) -> Place | None:
        """Where the weights of a service are; None: the engine has not loaded it, or it is not known yet."""
        if not self.runs or self.info is None or service not in self.info.services:
            return None
        if self.weights_memory_bytes is None:
            return Place.RESIDENT
        weights = self.weights(service)
        return None if weights is None else weights.place

    def weights(self, service: str) -> WeightsStats | None:
        """The latest statistics on the weights of a service; None: all weights stay, or none have come."""
        counted = None if self.stats is None else self.stats.services.get(service)
        return None if counted is None else counted.weights

    @property
    def resident_weight_bytes(self) -> int | None:
        """Bytes of weights in its memory, those that are coming included; None: not known."""
        if self.weights_memory_bytes is None:
            return None if self.info is None else self.info.weight_bytes
        if self.stats is None:
            return None
        found = [each.weights for each in self.stats.services.values() if each.weights is not None]
        sizes = {each.name: each.num_bytes for each in found if each.place is not Place.ABSENT}
        return sum(sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One service."""

    ready: int
    """Engines that accept its requests."""
    wanted: int
    """Engines that are to have it loaded; 0 while it is unloaded on purpose."""
    waiting: int
    """Requests without an engine."""
    loading: int = 0
    """Engines that are loading it; requests that wait for it are not refused meanwhile."""
    state: ServiceState = ServiceState.READY
    error: str | None = None
    """Why it could not be loaded."""
    resumed: int = 0
    """Requests that were resumed after the end of their engine."""
    batches: int = 0
    """Batches that were dispatched; 0 without batching."""
    batched_requests: int = 0
    """Requests in them; one that was in several counts in each."""
    idle_after_s: float | None = None
    """It is unloaded after this time without a request; None: never."""
    idle_since_ns: int | None = None
    """Since when it is idle, on the monotonic clock; None: it has requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """Limits against which requests are checked."""

    services: Mapping[str, ServiceInfo]
    """Limits by service: those of its engine with the longest requests."""
    takes_priorities: bool
    """Whether the orders of all engines use ``Request.priority``."""
    kernels: str
    """Kernels in use on the engines, as by ``native_status``."""
    device: str
    """Different devices, separated by commas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """One choice of a call, as ``/metrics`` counts requests."""

    id: str
    name: str | None
    """The client's name of its HTTP request."""
    service: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    phases: tuple[PhaseBegin, ...]
    ended_ns: int | None = None
    """None: it is unfinished."""
    finish: str | None = None
    """A ``FinishReason``; None: it is unfinished."""
    why: str = ""
    """Why it was refused or failed."""

    @property
    def engine(self) -> str | None:
        """Its engine, or the last one that it had."""
        return next((begin.engine for begin in reversed(self.phases) if begin.engine is not None), None)


class RequestTable(NamedTuple):
    """Requests of all engines."""

    unfinished: list[RequestStatus]
    """The oldest first."""
    ended: list[RequestStatus]
    """The last that ended, the latest last."""
    left_out: int
    """Unfinished requests that are not in the table."""
