"""The services of a cluster: which there are, where their models lie, and what its engines say of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.cluster.backends.interface import EngineConfig
from shoal.cluster.manager.events import ServiceSpeed
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.router.remote_engine import RemoteEngine
from shoal.cluster.status import ClusterInfo
from shoal.core import Service
from shoal.engine.info import EngineInfo, ServiceInfo

_UNMEASURED = ServiceSpeed(1e-3, 1e-2)


class Catalog:
    """All services that are known, also those that no engine has now.

    engines: of the cluster, by name. folders: of the services' models. builder: by which engines are built.
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
        """What clients can check requests against."""
        self._leaving: dict[str, Service] = {}  # an engine that dies with their requests loads them again
        self._engines = engines
        self._folders = dict(folders)
        self._builder = builder
        self._options = options
        self._limits: dict[str, ServiceInfo] = {}
        """Of every service, as they were when an engine had it last."""
        self._speeds: dict[tuple[str, int, str], ServiceSpeed] = {}

    def add(self, service: Service, folder: Path) -> None:
        """Know another service, whose model lies in ``folder``."""
        self.services[service.name] = service
        self._folders[service.name] = folder

    def remove(self, name: str) -> None:
        """Take no further requests of a service, until it is forgotten."""
        self._leaving[name] = self.services.pop(name)
        self._limits.pop(name, None)
        self.refresh()

    def forget(self, name: str) -> None:
        """Forget a service that was removed."""
        del self._leaving[name]
        self._folders.pop(name, None)

    def folder(self, service: str) -> Path:
        """Where its model lies."""
        return self._folders[service]

    def config(self, plan: EnginePlan, services: Sequence[str]) -> EngineConfig:
        """What an engine's process is started with, to have some services."""
        all_services = self.services | self._leaving
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
        """Whether engines have told of all services."""
        return self._limits.keys() >= self.services.keys()

    def room(self, service: str, prompt_tokens: int) -> int:
        """Tokens, prompt and output, that a request may have that names no limit.

        Those of the smallest engine that its prompt leaves room on, so that it can go to most engines.
        """
        rooms = {limits.max_total_tokens for limits in self._limits_of(service)}
        fitting = [room for room in rooms if room > prompt_tokens]
        return min(fitting, default=self._limits[service].max_total_tokens)

    def speed(self, engine: EngineInfo, service: str, info: ServiceInfo) -> ServiceSpeed:
        """The best that was measured of a service on engines with the device and the threads of this one.

        One that starts while others compute measures itself as too slow. Where nobody has measured, it is as
        fast as a small model on a CPU.
        """
        key = (engine.device, engine.threads, service)
        best = self._speeds.get(key)
        if info.prefill_s and info.decode_s:
            now = ServiceSpeed(info.prefill_s, info.decode_s)
            best = now if best is None else ServiceSpeed(*map(min, _pair(best), _pair(now)))
            self._speeds[key] = best
        return _UNMEASURED if best is None else best

    def refresh(self) -> None:
        """Make ``info`` anew, with limits as they were when a service was loaded last."""
        infos = self._infos()
        for name in self.services:
            if limits := self._limits_of(name):
                self._limits[name] = max(limits, key=lambda each: each.max_total_tokens)
        self.info = ClusterInfo(
            services={name: self._limits[name] for name in self.services if name in self._limits},
            takes_priorities=all(info.takes_priorities for info in infos),
            kernels=", ".join(dict.fromkeys(info.kernels for info in infos)),
            device=", ".join(dict.fromkeys(info.device for info in infos)),
        )

    def _infos(self) -> list[EngineInfo]:
        """What engines said of themselves."""
        return [engine.info for engine in self._engines.values() if engine.info is not None]

    def _limits_of(self, service: str) -> list[ServiceInfo]:
        """The limits of a service on each of its engines."""
        return [info.services[service] for info in self._infos() if service in info.services]


def _pair(speed: ServiceSpeed) -> tuple[float, float]:
    return speed.prefill_s, speed.decode_s
