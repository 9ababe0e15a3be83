"""Services of running engines: loads, unloads and pins them, each change in a task of its own."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping

from shoal.cluster.manager.actions import LoadService, UnloadService
from shoal.cluster.manager.events import ClusterEvent, ServiceFailed, ServiceLoaded, ServiceUnloaded
from shoal.cluster.router.remote_engine import RemoteEngine
from shoal.cluster.router.service_catalog import Catalog
from shoal.core import ConfigError, EngineDied, Service
from shoal.engine import wire
from shoal.engine.info import ServiceInfo

_log = logging.getLogger(__name__)


class EngineServices:
    """Asks engines to change their services, and emits the results.

    engines: by name. on_change: called when services of an engine have changed. on_failure: called with the
    engine, the service and the error, when a service cannot be loaded.
    """

    def __init__(
        self,
        engines: Mapping[str, RemoteEngine],
        catalog: Catalog,
        *,
        clock: Callable[[], int],
        emit: Callable[[ClusterEvent], None],
        on_change: Callable[[], None],
        on_failure: Callable[[str, str, str], None],
    ) -> None:
        self._engines = engines
        self._catalog = catalog
        self._clock = clock
        self._emit = emit
        self._on_change = on_change
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[object]] = set()

    def change(self, action: LoadService | UnloadService) -> None:
        """Let a running engine load or unload a service, and emit the result."""
        engine = self._engines[action.engine]
        if isinstance(action, LoadService):
            self._run(self._load(engine, action, self._catalog.services[action.service]))
        else:
            self._run(self._unload(engine, action))

    async def pin(self, name: str, pinned: bool) -> None:
        """Pin a service on all engines that have it, or unpin it; engines that load it later follow.

        Raises ConfigError, without effect, if an engine has too little memory for its weights.
        """
        before = self._catalog.services[name].pin
        self._catalog.pin(name, pinned)  # engines that become ready meanwhile follow it
        for engine in list(self._engines.values()):
            error = await self._pin(engine, name, pinned)
            if error is not None:
                self._catalog.pin(name, before)
                for each in self._engines.values():
                    self.follow_pins(each)
                raise ConfigError(f"engine {engine.plan.name}: {error}")

    def follow_pins(self, engine: RemoteEngine) -> None:
        """Pin the services of an engine as the catalog says."""
        for name, info in engine.services.items():
            service = self._catalog.services.get(name)
            if service is not None and service.pin != info.pinned:
                self._run(self._follow_pin(engine, name, service.pin))

    async def close(self) -> None:
        """Give up all changes."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, change: Coroutine[None, None, object]) -> None:
        task = asyncio.get_running_loop().create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a change of services ended unexpectedly", exc_info=error)

    async def _load(self, engine: RemoteEngine, action: LoadService, service: Service) -> None:
        name, folder = action.engine, str(self._catalog.folder(service.name))
        began_ns = self._clock()
        try:
            answer = await engine.ask(lambda key: wire.AddService(key, service, folder), wire.ServiceChanged)
        except EngineDied:
            return
        engine.services_changed(answer)
        self._on_change()
        if service.name not in answer.services:
            error = answer.error or "it cannot be loaded"
            self._on_failure(name, service.name, error)
            self._emit(ServiceFailed(name, action.incarnation, service.name, error))
            return
        took_s = (self._clock() - began_ns) / 1e9
        why = ", asked for by a request" if action.woken else ""
        _log.info("engine %s: service %s is loaded in %.1f s%s", name, service.name, took_s, why)
        assert engine.info is not None
        info = answer.services[service.name]
        speed = self._catalog.speed(engine.info, service.name, info)
        event = (name, action.incarnation, service.name, speed, info.kv_format, kv_tokens(answer.services))
        self._emit(ServiceLoaded(*event))
        self.follow_pins(engine)

    async def _unload(self, engine: RemoteEngine, action: UnloadService) -> None:
        try:
            answer = await engine.ask(
                lambda key: wire.RemoveService(key, action.service, True), wire.ServiceChanged
            )
        except EngineDied:
            return
        why = "" if answer.error is None else f" ({answer.error})"
        _log.info("engine %s: service %s is unloaded%s", action.engine, action.service, why)
        engine.services_changed(answer)
        self._on_change()
        event = (action.engine, action.incarnation, action.service, kv_tokens(answer.services))
        self._emit(ServiceUnloaded(*event))

    async def _pin(self, engine: RemoteEngine, service: str, pinned: bool) -> str | None:
        """Pin a service on one engine, or unpin it; returns why that is impossible."""
        if service not in engine.services:
            return None
        try:
            answer = await engine.ask(lambda key: wire.PinService(key, service, pinned), wire.ServiceChanged)
        except EngineDied:
            return None
        engine.services_changed(answer)
        if answer.error is None:
            done = "pinned" if pinned else "no longer pinned"
            _log.info("engine %s: service %s is %s", engine.plan.name, service, done)
        return answer.error

    async def _follow_pin(self, engine: RemoteEngine, service: str, pinned: bool) -> None:
        error = await self._pin(engine, service, pinned)
        if error is not None:
            _log.warning("engine %s: service %s cannot be pinned: %s", engine.plan.name, service, error)


def kv_tokens(services: Mapping[str, ServiceInfo]) -> dict[str, int]:
    """Tokens that the KV pool can hold, by service."""
    return {service: info.kv_tokens for service, info in services.items()}
