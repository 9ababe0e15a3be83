"""Administration at run time: add, load, unload, drain and remove engines and services."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.cluster.manager.events import (
    ClusterEvent,
    EngineActivated,
    EngineAdded,
    EngineDeactivated,
    EngineDraining,
    EngineRemoved,
    EngineUndrained,
    MigrationMethod,
    MigrationWanted,
    ServiceKept,
    ServicePlaced,
    ServiceRemoved,
    ServiceWanted,
)
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import EnginePlan
from shoal.cluster.placing.placer import Placer
from shoal.cluster.placing.status import Proposal
from shoal.cluster.router.fleet import Fleet
from shoal.cluster.status import EngineState, EngineStatus, ServiceState
from shoal.core import ConfigError, EngineDied, Service
from shoal.frontend.detokenize import Decoder

_POLL_S = 0.02


class Administration:
    """Operations of administrators; each method returns when the change is made.

    decoders: the router's, by service name. emit: takes events for the manager.
    """

    def __init__(
        self,
        manager: Manager,
        fleet: Fleet,
        decoders: dict[str, Decoder],
        emit: Callable[[ClusterEvent], None],
        placer: Placer,
    ) -> None:
        self._manager = manager
        self._fleet, self._catalog = fleet, fleet.catalog
        self._decoders = decoders
        self._emit = emit
        self._placer = placer

    def watch_idle_services(self) -> None:
        """Unload services of the configuration that are idle for too long."""
        for name, service in self._catalog.services.items():
            if service.idle_after_s is not None:
                engines = [engine.name for engine in self._manager.engines if name in engine.services]
                self._emit(ServicePlaced(name, tuple(engines), service.idle_after_s))

    async def add_service(
        self, service: Service, folder: Path, tokenizer: Decoder, engines: Sequence[str] | None = None
    ) -> None:
        """Load a service, whose model is in ``folder``, on ``engines`` (None: all).

        Raises ConfigError if its name is taken, an engine is unknown, or no engine can load it.
        """
        name = service.name
        if name in self._manager.services:
            raise ConfigError(f"there is a service {name!r} already; choose another name, or remove it first")
        known = [engine.name for engine in self._manager.engines]
        chosen = known if engines is None else list(engines)
        statuses = [self._require_engine(engine) for engine in chosen]
        if not any(engine.active for engine in statuses):
            raise ConfigError(f"engine {', '.join(chosen)} does not run; activate one, or choose another")
        self._catalog.add(service, folder)
        self._decoders[name] = tokenizer
        self._emit(ServicePlaced(name, tuple(chosen), service.idle_after_s))
        await self._wait_while(name, ServiceState.LOADING)
        if name not in self._catalog.info.services:
            error = self._manager.service(name).error or "its engine ended"
            await self.remove_service(name)
            raise ConfigError(f"service {name!r} cannot be loaded: {error}")

    async def remove_service(self, name: str) -> None:
        """Remove a service; raises ConfigError if it is unknown, or the last one.

        It accepts no new requests, and is unloaded when its requests have ended.
        """
        self._require_service(name)
        if len(self._catalog.services) == 1:
            raise ConfigError(f"service {name!r} is the last one; add another before, or unload it")
        self._catalog.remove(name)
        self._emit(ServiceRemoved(name))
        while name in self._manager.services:
            await asyncio.sleep(_POLL_S)
        del self._decoders[name]
        self._catalog.forget(name)

    async def load_service(self, name: str) -> None:
        """Load a service where it is placed; raises ConfigError if it is unknown, or fails to load."""
        self._require_service(name)
        self._emit(ServiceWanted(name, True))
        if await self._wait_while(name, ServiceState.LOADING) is ServiceState.FAILED:
            raise ConfigError(f"service {name!r} cannot be loaded: {self._manager.service(name).error}")

    async def unload_service(self, name: str) -> None:
        """Unload a service once its requests have ended, until a request comes.

        Raises ConfigError if it is unknown, or if a new request before that keeps it loaded.
        """
        self._require_service(name)
        self._emit(ServiceWanted(name, False))
        if await self._wait_while(name, ServiceState.DRAINING) in (ServiceState.LOADING, ServiceState.READY):
            raise ConfigError(f"service {name!r} stays loaded: a request came meanwhile")

    async def pin_service(self, name: str, pinned: bool) -> None:
        """Have the weights of a service always in the memory of its engines, or let them come and go again.

        Raises ConfigError, without effect, if the service is unknown, or an engine has too little memory.
        """
        self._require_service(name)
        await self._fleet.services.pin(name, pinned)

    async def keep_service(self, name: str, idle_after_s: float | None) -> None:
        """Set the idle time of a loaded service, until its next unload; raises ConfigError if it is unknown.

        idle_after_s: None: it stays loaded. 0: it is unloaded when this returns, or once its requests have
        ended.
        """
        self._require_service(name)
        self._emit(ServiceKept(name, idle_after_s))
        if idle_after_s == 0:
            await self._wait_while(name, ServiceState.DRAINING)

    async def add_engine(self, plan: EnginePlan) -> None:
        """Start another engine; raises ConfigError if its name is taken, EngineDied if it does not start."""
        if plan.name in self._fleet.engines:
            raise ConfigError(f"there is an engine {plan.name!r} already; choose another name")
        for service in plan.options.services:
            self._require_service(service.name)
        self._fleet.add(plan)
        self._emit(EngineAdded(plan.name, tuple(service.name for service in plan.options.services)))
        while (engine := self._engine(plan.name)) is not None and engine.state is EngineState.LOADING:
            await asyncio.sleep(_POLL_S)
        if engine is not None and engine.state is EngineState.WAITING:
            await self._remove(plan.name)
            raise EngineDied(f"engine {plan.name!r} does not start: {engine.last_error}")

    def migrate_request(self, request: str, engine: str | None, method: MigrationMethod) -> None:
        """Migrate a running request to an engine (None: the dispatch policy chooses), if that is possible.

        Raises ConfigError if there is no such engine.
        """
        if engine is not None:
            self._require_engine(engine)
        self._emit(MigrationWanted(request, engine, method))

    def check_leaving(self, name: str) -> None:
        """Check that an engine may be drained, removed, or go to standby.

        Raises ConfigError if it is unknown, the last one, or the only one of a service, not counting engines
        that drain or are on standby.
        """
        leaving = self._require_engine(name)
        others = [engine for engine in self._manager.engines if engine.name != name and engine.active]
        if leaving.state is EngineState.STANDBY:
            return
        if not others:
            raise ConfigError(
                f"engine {name!r} is the last one that takes requests; add or activate another before"
            )
        elsewhere = {service for engine in others for service in engine.placed}
        if only := [service for service in leaving.placed if service not in elsewhere]:
            raise ConfigError(
                f"engine {name!r} is the only one of {', '.join(only)}; add or activate an engine of the "
                "same services before, or remove these"
            )

    def drain_engine(self, name: str) -> None:
        """Send no new requests to an engine, and migrate its requests to other engines of their services.

        Raises ConfigError as ``check_leaving``.
        """
        self.check_leaving(name)
        self._emit(EngineDraining(name))

    def undrain_engine(self, name: str) -> None:
        """Let a drained engine accept requests again; raises ConfigError if it is unknown."""
        self._require_engine(name)
        self._emit(EngineUndrained(name))

    async def activate_engine(self, name: str) -> None:
        """Start an engine on standby, or keep one that drains to go there.

        Raises ConfigError if it is unknown, neither of these, or without services; EngineDied if it does not
        start.
        """
        engine = self._require_engine(name)
        if engine.state is not EngineState.STANDBY and not engine.deactivating:
            raise ConfigError(f"engine {name!r} is not on standby, but {engine.state}")
        if not engine.services:
            raise ConfigError(f"engine {name!r} has no service to load; place one on it before")
        self._emit(EngineActivated(name))
        while (present := self._engine(name)) is not None and (
            present.stopping or present.state is EngineState.LOADING
        ):
            await asyncio.sleep(_POLL_S)
        if present is not None and present.state is EngineState.WAITING:
            self._emit(EngineDeactivated(name))
            raise EngineDied(f"engine {name!r} does not start: {present.last_error}")

    async def deactivate_engine(self, name: str) -> None:
        """Migrate the requests of an engine to others, and end it until it is activated.

        Raises ConfigError as ``check_leaving``, or if it is activated or drained meanwhile.
        """
        self.check_leaving(name)
        self._emit(EngineDeactivated(name))
        while (engine := self._engine(name)) is not None and engine.deactivating:
            await asyncio.sleep(_POLL_S)
        if engine is not None and engine.state is not EngineState.STANDBY:
            raise ConfigError(f"engine {name!r} is {engine.state} again: it was changed meanwhile")

    async def set_engines(self, service: str, engines: Sequence[str]) -> None:
        """Let exactly these engines take requests of a service.

        Raises ConfigError if one is unknown, or does not load the service; then it is where it was, and
        perhaps on more engines.
        """
        await self._placer.set_engines(service, engines)

    async def propose_placement(self, *, apply: bool) -> Proposal:
        """Search a placement for the latest traffic; apply: and change to it, if it is worth it.

        Raises ConfigError as ``Placer.propose``.
        """
        return await self._placer.propose(apply=apply)

    async def remove_engine(self, name: str) -> None:
        """End an engine; its requests resume on other engines. Raises ConfigError as ``check_leaving``."""
        self.check_leaving(name)
        await self._remove(name)

    async def _remove(self, name: str) -> None:
        self._fleet.forget(name)
        self._emit(EngineRemoved(name))
        while name in self._fleet.engines:
            await asyncio.sleep(_POLL_S)

    async def _wait_while(self, service: str, passing: ServiceState) -> ServiceState:
        """Wait until the state of a service is no longer ``passing``, and return it."""
        while (state := self._manager.service(service).state) is passing:
            await asyncio.sleep(_POLL_S)
        return state

    def _engine(self, name: str) -> EngineStatus | None:
        return next((engine for engine in self._manager.engines if engine.name == name), None)

    def _require_engine(self, name: str) -> EngineStatus:
        engine = self._engine(name)
        if engine is None:
            known = ", ".join(engine.name for engine in self._manager.engines)
            raise ConfigError(f"there is no engine {name!r}; there are: {known}")
        return engine

    def _require_service(self, name: str) -> None:
        known = self._catalog.services
        if name not in known:
            raise ConfigError(f"there is no service {name!r}; there are: {', '.join(known)}")
