"""The JSON that tells of engines and services: health, and the routes of operators."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from shoal.cluster.status import EngineState, EngineStatus, ServiceState, ServiceStatus

HealthName = Literal["ok", "degraded", "draining", "down"]


class EngineHealth(Struct):
    """One engine in a response of /health."""

    name: str
    state: str
    """waiting (for its next start), loading, ready or draining."""
    pid: int | None
    restarts: int
    heartbeat_age_s: float | None
    last_error: str | None
    """Why it ended last."""

    @classmethod
    def of(cls, engine: EngineStatus) -> "EngineHealth":
        """From what is known of the engine."""
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
    """Engines that take its requests."""
    wanted: int
    """Engines that are to have it in their memory; none while it is unloaded on purpose."""
    waiting: int
    """Requests that no engine has."""

    @classmethod
    def of(cls, service: ServiceStatus) -> "ServiceHealth":
        """From what is known of the service."""
        return cls(service.state.value, service.ready, service.wanted, service.waiting)


class Health(Struct):
    """Response of /health."""

    status: HealthName
    engines: list[EngineHealth]
    services: dict[str, ServiceHealth]

    @classmethod
    def of(
        cls, engines: Sequence[EngineStatus], services: Mapping[str, ServiceStatus], draining: bool
    ) -> "Health":
        """From what is known; draining: whether the server is about to end."""
        return cls(
            "draining" if draining else _status(engines, services),
            [EngineHealth.of(engine) for engine in engines],
            {name: ServiceHealth.of(service) for name, service in services.items()},
        )

    @property
    def answers(self) -> bool:
        """Whether any service takes requests."""
        return self.status in ("ok", "degraded")


def takes_requests(service: ServiceStatus, engines: Sequence[EngineStatus]) -> bool:
    """Whether a request for a service is answered, even if it must be loaded first."""
    if service.ready or service.loading:
        return True
    unloaded = service.state in (ServiceState.UNLOADED, ServiceState.DRAINING)
    return unloaded and any(engine.state is EngineState.READY for engine in engines)


def _status(engines: Sequence[EngineStatus], services: Mapping[str, ServiceStatus]) -> HealthName:
    if not any(takes_requests(service, engines) for service in services.values()):
        return "down"
    return "ok" if all(engine.state is EngineState.READY for engine in engines) else "degraded"


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
    """That it has not finished."""
    leases: int
    """Requests of other engines for which it keeps KV: they come, or may come back."""
    pid: int | None
    restarts: int
    heartbeat_age_s: float | None
    last_error: str | None
    threads: int | None
    """As the next three, null before it was ready for the first time."""
    kv_bytes: int | None
    weight_bytes: int | None

    @classmethod
    def of(cls, engine: EngineStatus) -> "EngineCard":
        """From what is known of the engine."""
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
            None if info is None else info.weight_bytes,
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
    """Names of those that are to serve it."""
    ready: int
    wanted: int
    waiting: int
    resumed: int
    """How often a request went on after the end of its engine."""
    idle_after_s: float | None
    """It is unloaded after this time without a request; null: never."""


class ServiceCards(Struct):
    """Response of /admin/services."""

    data: list[ServiceCard]
    object: Literal["list"] = "list"


class PlacementTable(Struct):
    """Response of /admin/placement."""

    placement: dict[str, list[str]]
    """Names of the engines of each service."""


class Operation(Struct, kw_only=True):
    """Work that an operator has started, as the routes below /admin/operations tell it."""

    id: str
    kind: str
    """add, remove, load or unload _service; add, drain or remove _engine."""
    target: str
    """Name of the service or engine."""
    state: Literal["running", "done", "failed"] = "running"
    progress: str = ""
    """What is being done."""
    done: int = 0
    """How much of that, in bytes of a download, else in steps."""
    total: int | None = None
    """Of how much, where that is known."""
    error: str | None = None
    """Why it failed."""
    started: float
    """When, in seconds since 1970; as ``ended``."""
    ended: float | None = None


class OperationList(Struct):
    """Response of /admin/operations."""

    data: list[Operation]
    object: Literal["list"] = "list"


def rounded(seconds: float | None) -> float | None:
    """To milliseconds."""
    return None if seconds is None else round(seconds, 3)
