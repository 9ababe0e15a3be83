"""The engines of a router: starts them through a backend, connects to them, reports their events."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.cluster.backends.interface import BackendEvent, EngineBackend, EngineWaiting
from shoal.cluster.manager.actions import FleetChanged
from shoal.cluster.manager.events import (
    ClusterEvent,
    EngineAdded,
    EngineEnded,
    EngineFound,
    EngineHeartbeat,
    EngineLoading,
    EngineProcessUsage,
    EngineReady,
)
from shoal.cluster.node import EngineExited, EngineMessage, EngineUsage
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.router.call import call_of
from shoal.cluster.router.engine_services import EngineServices, kv_tokens
from shoal.cluster.router.remote_engine import OpenChannel, RemoteEngine
from shoal.cluster.router.service_catalog import Catalog
from shoal.core import ConfigError, EngineDied
from shoal.engine import wire
from shoal.engine.process.lifeline import Beat, Failed, Loading, Ready, failure_to_error

_log = logging.getLogger(__name__)


class Fleet:
    """All engines of a cluster by name, and the backend that runs their processes.

    emit: takes events for the manager. on_message: takes an engine's name and its message. on_end: called
    with the name and the reason, before ``emit``, when an engine that was ready has ended.
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
        emit: Callable[[ClusterEvent], None],
        on_message: Callable[[str, wire.FromEngine], None],
        on_end: Callable[[str, str], None],
    ) -> None:
        self._backend = engine_backend
        self._session = session
        self._open_channel = open_channel
        self._emit = emit
        self._on_message = on_message
        self._on_end = on_end
        self._engines = {plan.name: RemoteEngine(plan, clock) for plan in plans}
        self._clock = clock
        self.catalog = Catalog(self._engines, folders, builder, options)
        self.found: dict[str, int] = {}
        """Process ids of the engines that an earlier server left running, by name."""
        self._inherited: dict[str, int] = {}
        """Incarnations of engines that an earlier server left running, until all engines have answered."""
        self.services = EngineServices(
            self._engines,
            self.catalog,
            clock=clock,
            emit=emit,
            on_change=self._services_changed,
            on_failure=self._service_failed,
        )
        self._progress: Callable[[str], None] | None = None
        self._closing = False
        self._leaving: set[str] = set()
        self._stopped: dict[str, int] = {}
        """Incarnations of engines that were ended because they go to standby, by name."""
        self._killed: dict[str, tuple[int, str]] = {}
        """Incarnation of an engine that was killed last, and why."""
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def engines(self) -> Mapping[str, RemoteEngine]:
        return self._engines

    async def start(self, progress: Callable[[str], None] | None) -> None:
        """Start all engines, or attach to running ones, and wait until they answer and have all services.

        progress: called with what is being loaded. A found engine that ends, or is killed because it hangs,
        is replaced. Raises the error of another engine that ends, and ConfigError if found engines have other
        settings or cannot load a service again that an earlier server unloaded.
        """
        self._progress = progress
        settings: dict[str, str] = {}
        for name, engine in self._engines.items():
            config = self.catalog.config(engine.plan, _service_names(engine.plan))
            settings |= config.settings(f"engine {name}")
        found = {engine.engine: engine for engine in await self._backend.attach(self._on_event, settings)}
        for name in found.keys() - self._engines.keys():
            # An earlier server was asked to add it.
            self._backend.kill_engine(name, found[name].incarnation)
        for name, engine in self._engines.items():
            services = _service_names(engine.plan)
            if name not in found:
                self._emit(EngineAdded(name, services))
                continue
            running = found[name]
            engine.started(running.incarnation)
            engine.heartbeat(running.pid)
            self._emit(EngineFound(name, running.incarnation, services))
            self.found[name] = running.pid
            self._inherited[name] = running.incarnation
            if running.ready is not None:
                self._connect(engine, running.incarnation, running.pid, running.ready)
        await self._wait_for_answers()

    async def _wait_for_answers(self) -> None:
        """Wait until all engines are ready and have answered; found ones may hang."""
        while True:
            await self._started
            try:
                for name, engine in self._engines.items():
                    if not self._is_stopped(name, engine.incarnation):
                        await engine.ask(wire.AskStats, wire.Stats)
            except EngineDied:
                if self._started.done() and not self._is_stopped(name, engine.incarnation):
                    raise
            else:
                self._inherited.clear()
                return

    def add(self, plan: EnginePlan) -> None:
        """Add an engine, without starting it."""
        self._engines[plan.name] = RemoteEngine(plan, self._clock)

    def forget(self, name: str) -> None:
        """Delete an engine once its process has ended."""
        if self._engines[name].runs:
            self._leaving.add(name)
        else:
            del self._engines[name]
            self._services_changed()

    def start_engine(self, name: str, incarnation: int, services: Sequence[str]) -> None:
        config = self.catalog.config(self._engines[name].plan, services)
        self._engines[name].started(incarnation)
        self._backend.start_engine(name, incarnation, config)

    def kill_engine(self, name: str, incarnation: int, why: str) -> None:
        level = logging.INFO if name in self._leaving else logging.WARNING
        _log.log(level, "engine %s is killed: %s", name, why)
        self._killed[name] = (incarnation, why)
        self._backend.kill_engine(name, incarnation)

    def report_change(self, change: FleetChanged) -> None:
        """Log why an engine is activated, or goes to standby."""
        what = "is activated" if change.activated else "goes to standby"
        _log.info("engine %s %s: %s (%d are to run)", change.engine, what, change.why, change.wanted)

    def stop_engine(self, name: str, incarnation: int) -> None:
        """End the process of an engine without requests, which goes to standby."""
        self._stopped[name] = incarnation
        self._backend.stop_engine(name, incarnation)

    def _is_stopped(self, name: str, incarnation: int) -> bool:
        """Whether this start of an engine was ended because it goes to standby."""
        return self._stopped.get(name) == incarnation

    def kill_inconsistent(self, engine: str, why: str) -> None:
        """Kill an engine that sent an inconsistent message."""
        _log.error("engine %s is not to be trusted: %s", engine, why)
        self.kill_engine(engine, self._engines[engine].incarnation, why)

    def send(self, engine: str, message: wire.ToEngine) -> None:
        """Send to an engine; lost if it is gone."""
        self._engines[engine].send(message)

    def ask_stats(self) -> None:
        """Request stats from every engine that has answered the last request."""
        for engine in self._engines.values():
            engine.ask_stats()

    @property
    def block_size(self) -> int:
        """Tokens in a KV block of the first engine."""
        return next(engine.info.block_size for engine in self._engines.values() if engine.info is not None)

    def _services_changed(self) -> None:
        """Engines' services have changed: refresh the catalog, and finish the start if it is complete."""
        self.catalog.refresh()
        connected = all(
            engine.connected or self._is_stopped(name, engine.incarnation)
            for name, engine in self._engines.items()
        )
        if connected and self.catalog.complete and not self._started.done():
            self._started.set_result(None)

    def _service_failed(self, engine: str, service: str, error: str) -> None:
        """An engine cannot load a service; at the start that ends it."""
        if self._start_completed:
            _log.warning("engine %s: service %s is not loaded: %s", engine, service, error)
        elif not self._started.done():
            self._started.set_exception(ConfigError(f"service {service!r} cannot be loaded: {error}"))

    async def close(self) -> None:
        self._closing = True
        await self.services.close()
        if self._started.done() and not self._started.cancelled():
            self._started.exception()  # mark it as retrieved
        for engine in self._engines.values():
            engine.disconnect("the engine was shut down")
        await self._backend.close()

    def _on_event(self, event: BackendEvent) -> None:
        if self._closing:
            return
        engine = self._engines.get(event.engine)
        if engine is None:
            return
        match event:
            case EngineMessage():
                self._handle_message(engine, event)
            case EngineUsage():
                self._emit(EngineProcessUsage(event.engine, event.incarnation, event.cpu_s, event.read_bytes))
            case EngineWaiting():
                self._report_progress(event.engine, event.what)
            case EngineExited():
                self._ended(engine, event)

    def _handle_message(self, engine: RemoteEngine, event: EngineMessage) -> None:
        """An engine sent a message over its lifeline."""
        match event.message:
            case Loading(what):
                self._report_progress(event.engine, what)
                self._emit(EngineLoading(event.engine, event.incarnation, what))
            case Ready() as ready:
                self._connect(engine, event.incarnation, event.pid, ready)
            case Beat(hung):
                engine.heartbeat(event.pid)
                self._emit(EngineHeartbeat(event.engine, event.incarnation, hung))

    def _report_progress(self, name: str, what: str) -> None:
        if self._progress is not None and not self._started.done():
            self._progress(what if len(self._engines) == 1 else f"engine {name}: {what}")

    def _connect(self, engine: RemoteEngine, incarnation: int, pid: int, ready: Ready) -> None:
        name, info = engine.plan.name, ready.info
        if engine.connected and incarnation == engine.incarnation:
            return  # a repeated message after a change of services
        engine.connect(
            pid, ready, self._session, self._open_channel, lambda message: self._on_message(name, message)
        )
        engine.ask_stats()
        if self._started.done():
            _log.info("engine %s is ready", name)
        services = info.services.items()
        speeds = {service: self.catalog.speed(info, service, limits) for service, limits in services}
        formats = {service: limits.kv_format for service, limits in services if limits.kv_format}
        pool = (info.kv_bytes, kv_tokens(info.services), info.block_size, info.host)
        self._emit(EngineReady(name, incarnation, speeds, formats, *pool))
        self._services_changed()
        self.services.follow_pins(engine)

    @property
    def _start_completed(self) -> bool:
        """Whether all engines have been ready. Before that, the end of any fails the start."""
        started = self._started
        return started.done() and not started.cancelled() and started.exception() is None

    def _ended(self, engine: RemoteEngine, event: EngineExited) -> None:
        killed, why = self._killed.get(event.engine, (None, ""))
        reason = f"{event.reason} ({why})" if killed == event.incarnation else event.reason
        if self._inherited.get(event.engine) == event.incarnation:
            self._replace_inherited(engine, reason)
        elif not self._started.done() and not self._is_stopped(event.engine, event.incarnation):
            named = reason if len(self._engines) == 1 else f"engine {event.engine}: {reason}"
            self._started.set_exception(_error(event.failure, named))
        if event.incarnation == engine.incarnation:
            loaded = engine.connected
            engine.disconnect(reason)
            engine.runs = False
            if self._is_stopped(event.engine, event.incarnation):
                _log.info("engine %s has ended and is on standby", event.engine)
            elif self._start_completed and event.engine not in self._leaving:
                if loaded:
                    self._on_end(event.engine, reason)
                else:
                    _log.warning("engine %s does not start: %s", event.engine, reason)
        suspects = tuple(dict.fromkeys(map(call_of, event.suspects)))
        self._emit(EngineEnded(event.engine, event.incarnation, reason, suspects))
        if event.engine in self._leaving and not engine.runs:
            self._leaving.discard(event.engine)
            self._killed.pop(event.engine, None)
            del self._engines[event.engine]
            self._services_changed()

    def _replace_inherited(self, engine: RemoteEngine, reason: str) -> None:
        """A found engine ended before all have answered: wait for its next incarnation."""
        name = engine.plan.name
        self.found.pop(name, None)
        _log.warning("engine %s: found running (process %s), and is replaced: %s", name, engine.pid, reason)
        if self._started.done():
            self._started = asyncio.get_running_loop().create_future()


def _service_names(plan: EnginePlan) -> tuple[str, ...]:
    return tuple(service.name for service in plan.options.services)


def _error(failure: str | None, reason: str) -> Exception:
    """The error of a failed start. failure: class name of the engine's own error, if it sent one."""
    if failure is not None:
        return failure_to_error(Failed(failure, reason), "loading")
    return EngineDied(f"the engine process ended while loading ({reason})")
