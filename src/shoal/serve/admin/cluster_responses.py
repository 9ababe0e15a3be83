"""Response bodies of /health and /admin: engines, services, placement, operations."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from shoal.cluster.status import EngineState, EngineStatus, ServiceState, ServiceStatus

HealthName = Literal["ok", "degraded", "draining", "down"]


class EngineHealth(Struct):
    """One engine in a response of /health."""

    name: str
    state: str
    """waiting (for its restart), loading, ready or draining."""
    pid: int | None
    restarts: int
    heartbeat_age_s: float | None
    last_error: str | None
    """Why the engine ended the last time."""

    @classmethod
    def of(cls, engine: EngineStatus) -> "EngineHealth":
        return cls(
            engine.name,
            engine.state.value,
            engine.pid,
            engine.restarts,
            rounded(engine.heartbeat_age_s),
            engine.last_error,
        )


class ServiceHealth(Struct):
    """One service in a response of /health."""

    state: str
    """loading, ready, draining, unloaded (a request loads it) or failed."""
    ready: int
    """Number of engines that accept its requests."""
    wanted: int
    """Number of engines that should have it loaded; 0 while it is unloaded on purpose."""
    waiting: int
    """Number of requests that no engine has."""
    weights: dict[str, str]
    """By engine that has loaded it: resident, coming or absent."""

    @classmethod
    def of(cls, name: str, service: ServiceStatus, engines: Sequence[EngineStatus]) -> "ServiceHealth":
        places = weight_places(name, engines)
        return cls(service.state.value, service.ready, service.wanted, service.waiting, places)


class Health(Struct):
    """Response of /health."""

    status: HealthName
    engines: list[EngineHealth]
    services: dict[str, ServiceHealth]

    @classmethod
    def of(
        cls, engines: Sequence[EngineStatus], services: Mapping[str, ServiceStatus], draining: bool
    ) -> "Health":
        """draining: whether the server is shutting down."""
        return cls(
            "draining" if draining else _status(engines, services),
            [EngineHealth.of(engine) for engine in engines],
            {name: ServiceHealth.of(name, service, engines) for name, service in services.items()},
        )

    @property
    def is_serving(self) -> bool:
        """Whether any service accepts requests."""
        return self.status in ("ok", "degraded")


def weight_places(service: str, engines: Sequence[EngineStatus]) -> dict[str, str]:
    """Where the weights of a service are, by name of the engines that have loaded it."""
    places = {engine.name: engine.place(service) for engine in engines}
    return {name: place.value for name, place in places.items() if place is not None}


def accepts_requests(service: ServiceStatus, engines: Sequence[EngineStatus]) -> bool:
    """Whether a service accepts requests, even if it must be loaded first."""
    if service.ready or service.loading:
        return True
    unloaded = service.state in (ServiceState.UNLOADED, ServiceState.DRAINING)
    return unloaded and any(engine.state is EngineState.READY for engine in engines)


def _status(engines: Sequence[EngineStatus], services: Mapping[str, ServiceStatus]) -> HealthName:
    if not any(accepts_requests(service, engines) for service in services.values()):
        return "down"
    as_wanted = all(
        engine.state in (EngineState.READY, EngineState.STANDBY) or engine.deactivating for engine in engines
    )
    return "ok" if as_wanted else "degraded"


class Fine(Struct):
    """Response of /health/live and /health/ready."""

    status: Literal["ok"] = "ok"


class EngineCard(Struct):
    """One engine in a response of /admin/engines."""

    name: str
    state: str
    device: str
    services: list[str]
    requests: int
    """Number of unfinished requests."""
    leases: int
    """Requests on other engines for which it keeps KV, because they migrate to it or may return."""
    pid: int | None
    restarts: int
    heartbeat_age_s: float | None
    last_error: str | None
    threads: int | None
    """Null, like the next two, until the engine was ready once."""
    kv_bytes: int | None
    weight_bytes: int | None
    """Of weights in its memory now."""
    weights_memory_bytes: int | None
    """Limit on ``weight_bytes``; null: all weights stay in its memory."""

    @classmethod
    def of(cls, engine: EngineStatus) -> "EngineCard":
        info = engine.info
        return cls(
            engine.name,
            engine.state.value,
            engine.device,
            list(engine.services),
            engine.requests,
            engine.leases,
            engine.pid,
            engine.restarts,
            rounded(engine.heartbeat_age_s),
            engine.last_error,
            None if info is None else info.threads,
            None if info is None else info.kv_bytes,
            engine.resident_weight_bytes,
            engine.weights_memory_bytes,
        )


class EngineCards(Struct):
    """Response of /admin/engines."""

    data: list[EngineCard]
    object: Literal["list"] = "list"


class ServiceCard(Struct):
    """One service in a response of /admin/services."""

    name: str
    model: str
    state: str
    """pulling, loading, ready, draining, unloaded or failed."""
    error: str | None
    """Why it could not be loaded."""
    engines: list[str]
    """Names of the engines that should serve it."""
    ready: int
    wanted: int
    waiting: int
    resumed: int
    """How often a request continued after its engine ended."""
    idle_after_s: float | None
    """The service is unloaded after this time without a request; null: never."""
    weight_bytes: int | None
    """Size of its weights in memory, which services of one model may share; null: not known yet."""
    weights: dict[str, str]
    """By engine that has loaded it: resident, coming or absent."""
    pinned: bool
    """Whether its weights stay resident."""


class ServiceCards(Struct):
    """Response of /admin/services."""

    data: list[ServiceCard]
    object: Literal["list"] = "list"


class Operation(Struct, kw_only=True):
    """A long-running operation, in responses of /admin/operations."""

    id: str
    kind: str
    """add, remove, load, unload, place, pin or unpin _service; add, drain or remove _engine; plan or apply
    _placement."""
    target: str
    """Name of the service or engine; ``of all services`` for a placement."""
    state: Literal["running", "done", "failed"] = "running"
    progress: str = ""
    """The current step."""
    done: int = 0
    """Progress of the step: bytes of a download, or units of work."""
    total: int | None = None
    """The value of ``done`` at the end of the step; null: unknown."""
    error: str | None = None
    """Why the operation failed."""
    started: float
    """In seconds since 1970, like ``ended``."""
    ended: float | None = None


class OperationList(Struct):
    """Response of /admin/operations."""

    data: list[Operation]
    object: Literal["list"] = "list"


def rounded(seconds: float | None) -> float | None:
    """``seconds`` rounded to milliseconds."""
    return None if seconds is None else round(seconds, 3)
