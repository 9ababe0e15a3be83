"""The state of engines, services and requests that the page shows, as JSON; times are seconds since 1970."""

from collections.abc import Sequence, Set
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from shoal.cluster.manager.actions import MigrationOutcome
from shoal.cluster.status import EngineStatus, RequestStatus, RequestTable, ServiceStatus
from shoal.serve.admin.cluster_responses import HealthName, rounded
from shoal.serve.http.error_responses import shorten
from shoal.serve.metrics.server_metrics import INTER_TOKEN_BOUNDS, TTFT_BOUNDS
from shoal.serve.page.events import Event
from shoal.serve.page.window import Window, quantile

_RATE_S = 10.0
_MAX_WHY_CHARACTERS = 300


class ServiceKV(Struct, frozen=True):
    """A service's part of a pool."""

    live_bytes: int
    cached_bytes: int
    free_bytes: int
    """That only this service can use."""


class KV(Struct, frozen=True):
    """An engine's KV pool; the parts of services and ``free_bytes`` are the whole, but for remainders."""

    total_bytes: int
    live_bytes: int
    cached_bytes: int
    padding_bytes: int
    unfilled_bytes: int
    external_bytes: int
    free_bytes: int
    """That belongs to no service."""
    services: dict[str, ServiceKV]

    @classmethod
    def of(cls, engine: EngineStatus) -> Self | None:
        """None: the engine does not run, or has not reported yet."""
        if engine.stats is None or not engine.runs:
            return None
        pool = engine.stats.pool
        services = {
            name: ServiceKV(
                counted.live_blocks * counted.block_bytes,
                counted.cached_blocks * counted.block_bytes,
                counted.free_blocks * counted.block_bytes,
            )
            for name, counted in engine.stats.services.items()
        }
        free_bytes = pool.total_bytes * pool.free_merged_blocks // max(1, pool.merged_blocks)
        return cls(
            pool.total_bytes,
            pool.live_bytes,
            pool.cached_bytes,
            pool.padding_bytes,
            pool.unfilled_bytes,
            pool.external_bytes,
            free_bytes,
            services,
        )


class Engine(Struct, frozen=True):
    """One engine."""

    name: str
    state: str
    device: str
    restarts: int
    heartbeat_age_s: float | None
    last_error: str | None
    requests: int
    """Unfinished."""
    steps_per_s: float
    weight_bytes: int | None
    weights_memory_bytes: int | None
    moved: int
    """Requests that moved from it to other engines."""
    kv: KV | None

    @classmethod
    def of(cls, engine: EngineStatus, window: Window) -> Self:
        return cls(
            engine.name,
            engine.state.value,
            engine.device,
            engine.restarts,
            rounded(engine.heartbeat_age_s),
            engine.last_error,
            engine.requests,
            round(window.rate(("steps", engine.name), _RATE_S), 2),
            engine.resident_weight_bytes,
            engine.weights_memory_bytes,
            sum(n for (_, outcome), n in engine.migrations.items() if outcome is MigrationOutcome.DONE),
            KV.of(engine),
        )


class ServiceOnEngine(Struct, frozen=True):
    """One service on an engine that has loaded it."""

    weights: str
    """resident, coming or absent."""
    running: int
    waiting: int
    swapped: int


class Latency(Struct, frozen=True):
    """Quantiles over the last minute, in seconds; null: there was nothing."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, bounds: Sequence[float], cumulative: Sequence[float]) -> Self:
        values = (quantile(bounds, cumulative, share) for share in (0.5, 0.95, 0.99))
        rounded_values = [None if value is None else round(value, 5) for value in values]
        return cls(int(cumulative[-1]) if cumulative else 0, *rounded_values)


class Goals(Struct, frozen=True):
    """Requests with latency goals that ended in the last minute."""

    met: int
    missed: int


class Service(Struct, frozen=True):
    """One service over all engines."""

    name: str
    model: str
    state: str
    error: str | None
    chat: bool
    """Whether it has a chat template."""
    pinned: bool
    """Whether its weights stay resident."""
    engines: dict[str, ServiceOnEngine]
    running: int
    waiting: int
    """Including requests that no engine has."""
    swapped: int
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    """Rates over the last ten seconds."""
    ttft_s: Latency
    """Of answers that ended."""
    inter_token_s: Latency
    preemptions: int
    """In the last minute, as the next."""
    refused: int
    goals: Goals
    note: str = ""
    """Why it is slow; "": it does not seem so."""

    @classmethod
    def of(
        cls,
        name: str,
        model: str,
        chat: bool,
        pinned: bool,
        status: ServiceStatus,
        engines: Sequence[EngineStatus],
        window: Window,
    ) -> Self:
        parts = _parts(name, engines)
        return cls(
            name,
            model,
            status.state.value,
            status.error,
            chat,
            pinned,
            parts,
            sum(part.running for part in parts.values()),
            sum(part.waiting for part in parts.values()) + status.waiting,
            sum(part.swapped for part in parts.values()),
            round(window.rate(("ended", name), _RATE_S), 3),
            round(window.rate(("output_tokens", name), _RATE_S), 1),
            round(window.rate(("prompt_tokens", name), _RATE_S), 1),
            Latency.of(TTFT_BOUNDS, window.increase(("ttft", name))),
            Latency.of(INTER_TOKEN_BOUNDS, window.increase(("inter_token", name))),
            _count(window, "preemptions", name),
            _count(window, "refused", name),
            Goals(_count(window, "met", name), _count(window, "missed", name)),
        )


class Request(Struct, frozen=True):
    """One request: a choice of a call."""

    id: str
    name: str | None
    """The client's x-request-id, or one that the server made."""
    service: str
    engine: str | None
    """Its engine, or its last one."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    phases: list[tuple[float, str, str | None]]
    """(begin, phase, engine); each lasts until the next."""
    ended: float | None
    finish: str | None
    why: str
    """Why it was refused or failed; "": it was not."""

    @classmethod
    def of(cls, status: RequestStatus, epoch_ns: int) -> Self:
        """epoch_ns: the time of day minus the monotonic clock."""
        return cls(
            status.id,
            status.name,
            status.service,
            status.engine,
            status.prompt_tokens,
            status.cached_tokens,
            status.output_tokens,
            [
                (_seconds(begin_ns + epoch_ns), phase.value, engine)
                for begin_ns, phase, engine in status.phases
            ],
            None if status.ended_ns is None else _seconds(status.ended_ns + epoch_ns),
            status.finish,
            shorten(status.why, _MAX_WHY_CHARACTERS),
        )


class Snapshot(Struct, frozen=True):
    """What the page shows at one time."""

    time: float
    version: str
    status: HealthName
    engines: list[Engine]
    services: list[Service]
    requests: list[Request]
    """Unfinished ones, the oldest first, then those that have ended, the latest first."""
    requests_left_out: int
    events: list[Event]
    """The last ones, the oldest first."""

    def visible_to(self, services: Set[str] | None) -> Self:
        """Without what belongs to other services; None: all may be seen.

        The requests must be of ``services`` already, since of more than are shown the oldest are chosen.
        """
        if services is None:
            return self
        return replace(
            self,
            engines=[_visible_engine(engine, services) for engine in self.engines],
            services=[service for service in self.services if service.name in services],
            events=[event for event in self.events if event.service is None or event.service in services],
        )


def requests_of(table: RequestTable, epoch_ns: int) -> list[Request]:
    """All requests of a table; epoch_ns: as in ``Request.of``."""
    return [Request.of(status, epoch_ns) for status in (*table.unfinished, *reversed(table.ended))]


def _visible_engine(engine: Engine, services: Set[str]) -> Engine:
    if engine.kv is None:
        return engine
    parts = {name: part for name, part in engine.kv.services.items() if name in services}
    return replace(engine, kv=replace(engine.kv, services=parts))


def _parts(name: str, engines: Sequence[EngineStatus]) -> dict[str, ServiceOnEngine]:
    parts: dict[str, ServiceOnEngine] = {}
    for engine in engines:
        place = engine.place(name)
        counted = None if engine.stats is None else engine.stats.services.get(name)
        if place is not None and counted is not None:
            parts[engine.name] = ServiceOnEngine(
                place.value, counted.running, counted.waiting, counted.swapped
            )
    return parts


def _count(window: Window, counter: str, service: str) -> int:
    grown = window.increase((counter, service))
    return int(grown[0]) if grown else 0


def _seconds(time_ns: int) -> float:
    return round(time_ns / 1e9, 3)
