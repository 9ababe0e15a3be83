"""The engines of a router: started, connected, watched and described."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.cluster.backend import BackendEvent, Beat, EngineBackend, EngineConfig, Exited, Loaded, Loading
from shoal.cluster.call import call_of
from shoal.cluster.events import (
    ClusterEvent,
    EngineAdded,
    EngineBeat,
    EngineEnded,
    EngineFound,
    EngineReady,
    ServiceSpeed,
)
from shoal.cluster.options import ClusterOptions, EnginePlan, service_names
from shoal.cluster.remote_engine import OpenChannel, RemoteEngine
from shoal.cluster.status import ClusterInfo
from shoal.core import EngineDied
from shoal.engine import wire
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.lifeline import Failed, failure_to_error

_log = logging.getLogger(__name__)


class Fleet:
    """All engines of a cluster by name, and the backend that runs their processes.

    tell: takes what happens to engines, for the manager. on_message: takes an engine's name and what it sent.
    on_end: called with an engine's name and the reason, before ``tell``, when nothing more comes from it.
    """

    def __init__(
        self,
        plans: Sequence[EnginePlan],
        folders: Mapping[str, Path],
        builder: str,
        options: ClusterOptions,
        engine_backend: EngineBackend,
        *,
        session: str,
        open_channel: OpenChannel,
        clock: Callable[[], int],
        tell: Callable[[ClusterEvent], None],
        on_message: Callable[[str, wire.FromEngine], None],
        on_end: Callable[[str, str], None],
    ) -> None:
        self._backend = engine_backend
        self._session = session
        self._open_channel = open_channel
        self._tell = tell
        self._on_message = on_message
        self._on_end = on_end
        self._engines = {
            plan.name: RemoteEngine(plan, _config(plan, folders, builder, options), clock) for plan in plans
        }
        self.info = ClusterInfo(services={}, takes_priorities=False, kernels="", device="")
        """Limits that every engine of a service keeps."""
        self._progress: Callable[[str], None] | None = None
        self._closing = False
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def engines(self) -> Mapping[str, RemoteEngine]:
        """By name."""
        return self._engines

    async def start(self, progress: Callable[[str], None] | None) -> None:
        """Start all engines, or find those that run, and wait until they are ready.

        progress: called with what is loaded now. Raises the error that one of them ended with, and
        ConfigError if engines were found that were started with other settings.
        """
        self._progress = progress
        settings = {f"engine {name}": repr(engine.config) for name, engine in self._engines.items()}
        found = {engine.engine: engine for engine in await self._backend.attach(self._on_event, settings)}
        for name, engine in self._engines.items():
            services = _names(engine.plan)
            if name not in found:
                self._tell(EngineAdded(name, services))
                continue
            engine.beat(found[name].pid)
            self._tell(EngineFound(name, found[name].incarnation, services))
            if (loaded := found[name].loaded) is not None:
                self._on_event(loaded)
        await self._started

    def start_engine(self, name: str, incarnation: int, services: Sequence[str]) -> None:
        """Start the process of an engine with some of its services."""
        self._backend.start_engine(name, incarnation, self._engines[name].config)

    def kill_engine(self, name: str, incarnation: int, why: str) -> None:
        """Kill the process of an engine."""
        _log.error("engine %s is killed: %s", name, why)
        self._backend.kill_engine(name, incarnation)

    def send(self, engine: str, message: wire.ToEngine) -> None:
        """As in ``calls.Outbox``."""
        self._engines[engine].send(message)

    def distrust(self, engine: str, why: str) -> None:
        """As in ``calls.Outbox``."""
        self.kill_engine(engine, self._engines[engine].incarnation, why)

    def ask_stats(self) -> None:
        """Ask every engine that answered the last time for its stats."""
        for engine in self._engines.values():
            engine.ask_stats()

    @property
    def block_size(self) -> int:
        """Tokens in a KV block of the first engine."""
        return next(engine.info.block_size for engine in self._engines.values() if engine.info is not None)

    def _merged_info(self) -> ClusterInfo:
        infos = [engine.info for engine in self._engines.values() if engine.info is not None]
        names = service_names([engine.plan for engine in self._engines.values()])
        return ClusterInfo(
            services={name: _tightest(name, infos) for name in names},
            takes_priorities=all(info.takes_priorities for info in infos),
            kernels=", ".join(dict.fromkeys(info.kernels for info in infos)),
            device=", ".join(dict.fromkeys(info.device for info in infos)),
        )

    async def close(self) -> None:
        """End all engines."""
        self._closing = True
        if self._started.done() and not self._started.cancelled():
            self._started.exception()  # somebody else has seen it, or wants it no more
        for engine in self._engines.values():
            engine.disconnect("the engine was shut down")
        await self._backend.close()

    def _on_event(self, event: BackendEvent) -> None:
        if self._closing:
            return
        engine = self._engines[event.engine]
        match event:
            case Loading():
                if self._progress is not None and not self._started.done():
                    alone = len(self._engines) == 1
                    self._progress(event.what if alone else f"engine {event.engine}: {event.what}")
            case Loaded():
                self._connect(engine, event)
            case Beat():
                engine.beat(event.pid)
                self._tell(EngineBeat(event.engine, event.incarnation, event.overdue_s))
            case Exited():
                self._ended(engine, event)

    def _connect(self, engine: RemoteEngine, event: Loaded) -> None:
        name = event.engine
        engine.connect(
            event, self._session, self._open_channel, lambda message: self._on_message(name, message)
        )
        engine.ask_stats()
        speeds = {
            service: ServiceSpeed(info.prefill_s, info.decode_s)
            for service, info in event.info.services.items()
        }
        self._tell(EngineReady(name, event.incarnation, speeds))
        if all(other.info is not None for other in self._engines.values()):
            self.info = self._merged_info()
            if not self._started.done():
                self._started.set_result(None)

    def _ended(self, engine: RemoteEngine, event: Exited) -> None:
        if not self._started.done():
            self._started.set_exception(_error(event))
        if event.incarnation == engine.incarnation or not engine.connected:
            engine.disconnect(event.reason)
            self._on_end(event.engine, event.reason)
        suspects = tuple(dict.fromkeys(map(call_of, event.suspects)))
        self._tell(EngineEnded(event.engine, event.incarnation, event.reason, suspects))


def _names(plan: EnginePlan) -> tuple[str, ...]:
    return tuple(service.name for service in plan.options.services)


def _config(
    plan: EnginePlan, folders: Mapping[str, Path], builder: str, options: ClusterOptions
) -> EngineConfig:
    own = {name: folders[name] for name in _names(plan) if name in folders}
    return EngineConfig(options=plan.options, folders=own, builder=builder, heartbeat_s=options.heartbeat_s)


def _error(event: Exited) -> Exception:
    if event.failure is not None:
        return failure_to_error(Failed(event.failure, event.reason), "loading")
    return EngineDied(f"the engine process ended while loading ({event.reason})")


def _tightest(name: str, infos: Sequence[EngineInfo]) -> ServiceInfo:
    """The tightest limits among the engines of a service."""
    return min(
        (info.services[name] for info in infos if name in info.services),
        key=lambda limits: limits.max_total_tokens,
    )
