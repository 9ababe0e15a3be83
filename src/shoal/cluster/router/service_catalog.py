"""The catalog of services: their model folders, limits (context, total tokens) and measured speeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.cluster.backends.interface import EngineConfig
from shoal.cluster.manager.events import ServiceSpeed
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.router.remote_engine import RemoteEngine
from shoal.cluster.status import ClusterInfo
from shoal.core import SLO, Request, Service
from shoal.core.slo import resolve_slo
from shoal.engine.info import EngineInfo, ServiceInfo

_UNMEASURED = ServiceSpeed(1e-3, 1e-2)


class Catalog:
    """All services, including unloaded ones.

    engines: by name. folders: of the services' models. builder: as in ``Router.start``.
    """

    def __init__(
        self,
        engines: Mapping[str, RemoteEngine],
        folders: Mapping[str, Path],
        builder: str,
        options: ClusterOptions,
    ) -> None:
        plans = [engine.plan for engine in engines.values()]
        self.services = {service.name: service for plan in plans for service in plan.options.services}
        """By name."""
        self.info = ClusterInfo(services={}, takes_priorities=False, kernels="", device="")
        self._removed: dict[str, Service] = {}  # removed, but with requests: loaded again after a death
        self._engines = engines
        self._folders = dict(folders)
        self._builder = builder
        self._options = options
        self._limits: dict[str, ServiceInfo] = {}
        """Limits by service, kept when it is unloaded."""
        self._speeds: dict[tuple[str, int, str], ServiceSpeed] = {}

    def add(self, service: Service, folder: Path) -> None:
        """Add a service, whose model is in ``folder``."""
        self.services[service.name] = service
        self._folders[service.name] = folder

    def pin(self, name: str, pinned: bool) -> None:
        """Set whether a service's weights always stay, wherever it is loaded from now on."""
        self.services[name] = replace(self.services[name], pin=pinned)
        self.refresh()

    def remove(self, name: str) -> None:
        """Accept no more requests of a service, until ``forget``."""
        self._removed[name] = self.services.pop(name)
        self._limits.pop(name, None)
        self.refresh()

    def forget(self, name: str) -> None:
        """Delete a removed service."""
        del self._removed[name]
        self._folders.pop(name, None)

    def folder(self, service: str) -> Path:
        """The folder of a service's model."""
        return self._folders[service]

    def goals(self, request: Request) -> SLO:
        """The goals of a new request, its own or those of its service."""
        service = self.services[request.service]
        return resolve_slo(request.slo, service.slo, service.execution_s)

    def config(self, plan: EnginePlan, services: Sequence[str]) -> EngineConfig:
        """The configuration of an engine's process with some services."""
        all_services = self.services | self._removed
        known = tuple(all_services[name] for name in services if name in all_services)
        return EngineConfig(
            options=replace(plan.options, services=known),
            folders={
                service.name: self._folders[service.name]
                for service in known
                if service.name in self._folders
            },
            builder=self._builder,
            heartbeat_s=self._options.heartbeat_s,
            step_timeout_s=self._options.step_timeout_s,
        )

    @property
    def complete(self) -> bool:
        """Whether the limits of all services are known."""
        return self._limits.keys() >= self.services.keys()

    def default_total_tokens(self, service: str, prompt_tokens: int) -> int:
        """Total tokens, prompt and output, of a request without ``max_tokens``.

        The limit of the smallest engine that holds its prompt, so that most engines can serve it.
        """
        limits_tokens = {limits.max_total_tokens for limits in self._limits_of(service)}
        fitting = [tokens for tokens in limits_tokens if tokens > prompt_tokens]
        return min(fitting, default=self._limits[service].max_total_tokens)

    def speed(self, engine: EngineInfo, service: str, info: ServiceInfo) -> ServiceSpeed:
        """The best measured speed of a service on engines with the same device and threads.

        An engine that starts while others compute measures itself as too slow. Without any measurement, the
        speed of a small model on a CPU.
        """
        key = (engine.device, engine.threads, service)
        best = self._speeds.get(key)
        if info.prefill_s and info.decode_s:
            now = ServiceSpeed(info.prefill_s, info.decode_s)
            best = now if best is None else ServiceSpeed(*map(min, _as_pair(best), _as_pair(now)))
            self._speeds[key] = best
        return _UNMEASURED if best is None else best

    def refresh(self) -> None:
        """Update ``info``; unloaded services keep their last limits."""
        infos = self._infos()
        for name in self.services:
            if limits := self._limits_of(name):
                self._limits[name] = max(limits, key=lambda each: each.max_total_tokens)
        self.info = ClusterInfo(
            services={
                name: replace(self._limits[name], pinned=service.pin)
                for name, service in self.services.items()
                if name in self._limits
            },
            takes_priorities=all(info.takes_priorities for info in infos),
            kernels=", ".join(dict.fromkeys(info.kernels for info in infos)),
            device=", ".join(dict.fromkeys(info.device for info in infos)),
        )

    def _infos(self) -> list[EngineInfo]:
        return [engine.info for engine in self._engines.values() if engine.info is not None]

    def _limits_of(self, service: str) -> list[ServiceInfo]:
        return [info.services[service] for info in self._infos() if service in info.services]


def _as_pair(speed: ServiceSpeed) -> tuple[float, float]:
    return speed.prefill_s, speed.decode_s
