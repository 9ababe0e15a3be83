"""What is known of a cluster's engines and services, for health, metrics and administration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.cluster.manager.actions import MoveOutcome
from shoal.cluster.manager.events import MoveMethod
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.stats import EngineStats


class EngineState(StrEnum):
    """Where an engine is in its life."""

    WAITING = "waiting"
    """It ended and waits for its next start."""
    LOADING = "loading"
    """Its process runs and loads."""
    READY = "ready"
    """It takes requests."""
    DRAINING = "draining"
    """It gets nothing new, and gives what it has to others, or finishes it."""


class ServiceState(StrEnum):
    """Where a service is in its life."""

    PULLING = "pulling"
    """Its model is being downloaded."""
    LOADING = "loading"
    """Engines are loading it, and none has it yet."""
    READY = "ready"
    """At least one engine takes its requests."""
    DRAINING = "draining"
    """It is to be unloaded, and has requests or weights still."""
    UNLOADED = "unloaded"
    """No engine has it; a request wakes it up."""
    FAILED = "failed"
    """It could not be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine."""

    name: str
    """Its name in the cluster."""
    state: EngineState
    """Where it is in its life."""
    services: tuple[str, ...]
    """What it serves, or will once it has loaded."""
    device: str
    """The device that it runs on."""
    pid: int | None = None
    """Of its process, if one runs."""
    restarts: int = 0
    """How often it was started again."""
    requests: int = 0
    """Requests that it has not finished."""
    leases: int = 0
    """Requests of other engines for which it keeps KV blocks: they come, or may come back."""
    moves: Mapping[tuple[MoveMethod, MoveOutcome], int] = field(default_factory=dict)
    """Migrations of requests from it that are over."""
    withdrawn: int = 0
    """Requests that a packer took from it, because they had room nowhere any more."""
    heartbeat_age_s: float | None = None
    """How long ago its last heartbeat came; None: none has."""
    last_error: str | None = None
    """Why it ended last."""
    info: EngineInfo | None = None
    """What it said of itself when it was ready last."""
    stats: EngineStats | None = None
    """Its latest counters and gauges; those of a dead engine stay."""
    stats_age_s: float = 0.0
    """How old they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One service."""

    ready: int
    """Engines that take its requests."""
    wanted: int
    """Engines that are to have it in their memory: none while it is unloaded on purpose."""
    waiting: int
    """Requests that no engine has."""
    loading: int = 0
    """Engines that run and load it: requests that wait for it are not given up."""
    state: ServiceState = ServiceState.READY
    """Where it is in its life."""
    error: str | None = None
    """Why it could not be loaded."""
    resumed: int = 0
    """How often a request went on after the end of its engine."""
    idle_after_s: float | None = None
    """It is unloaded when it had no request for so long; None: never."""
    idle_since_ns: int | None = None
    """Since when it has no request, on the monotonic clock; None: it has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """What clients of a cluster can check requests against."""

    services: Mapping[str, ServiceInfo]
    """Limits of the services by name: of each those of its engine that takes the longest requests."""
    takes_priorities: bool
    """Whether the order of every engine looks at ``Request.priority``."""
    kernels: str
    """What computes on the engines' devices, as ``native_status`` says it."""
    device: str
    """The devices, with commas between different ones."""
