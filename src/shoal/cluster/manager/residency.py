"""Which services are in the memory of which engines, and which should be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.cluster.manager.actions import LoadService, UnloadService
from shoal.cluster.manager.events import (
    ServiceEvent,
    ServiceFailed,
    ServiceKept,
    ServiceLoaded,
    ServicePlaced,
    ServiceRemoved,
    ServiceUnloaded,
    ServiceWanted,
)
from shoal.cluster.manager.state import Engine, Residence, running_engine
from shoal.cluster.status import EngineState, ServiceState

ResidencyAction = LoadService | UnloadService


@dataclass(slots=True, eq=False)
class _Service:
    """One service that is placed on engines."""

    wanted: bool = True
    """Whether it is to be loaded there."""
    removed: bool = False
    """Whether it is to be forgotten once it is unloaded."""
    placed_idle_ns: int | None = None
    """It was placed to be unloaded when it had no request for so long; None: never."""
    idle_after_ns: int | None = None
    """The same as it is now, until it is unloaded."""
    unfinished: int = 0
    """Requests that have not ended."""
    woken: bool = False
    """Whether it is loaded again because a request came."""
    used_ns: int = 0
    """When the last one ended, or the service was loaded."""
    error: str | None = None
    """Why an engine could not load it last."""

    @property
    def over(self) -> bool:
        """Whether no engine is to load it again, even one that died with its requests."""
        return self.removed and not self.unfinished


class Residency:
    """Loads and unloads services on running engines.

    A service is unloaded from all engines together, and only while it has no request: one that comes before
    that keeps it, one that comes later loads it again.
    """

    def __init__(self) -> None:
        self._services: dict[str, _Service] = {}

    @property
    def names(self) -> Sequence[str]:
        """All services that are known, in the order in which they were placed first."""
        return list(self._services)

    def told(self, event: ServiceEvent, engines: Mapping[str, Engine], now_ns: int) -> list[ResidencyAction]:
        """Something happened to a service; ``engines``: all that are wanted, by name."""
        service = event.service
        placed = [engine for engine in engines.values() if service in engine.residences]
        match event:
            case ServicePlaced():
                chosen = [engines[name] for name in event.engines if name in engines]
                return self._place(service, chosen, event.idle_after_s, now_ns)
            case ServiceWanted():
                return self._want(service, event.loaded, placed)
            case ServiceKept():
                return self._keep(service, event.idle_after_s, placed, now_ns)
            case ServiceRemoved():
                return self._remove(service, placed)
        engine = running_engine(engines, event)
        if engine is None:
            return []
        if isinstance(event, ServiceLoaded | ServiceUnloaded):
            engine.load.kv_tokens = dict(event.kv_tokens)
        if isinstance(event, ServiceLoaded):
            engine.load.learn(service, event.speed)
            engine.kv_formats[service] = event.kv_format
            return self._moved(service, engine, Residence.LOADED, now_ns)
        if isinstance(event, ServiceFailed):
            return self._moved(service, engine, Residence.FAILED, now_ns, event.error)
        return self._moved(service, engine, Residence.ABSENT, now_ns)

    def add(self, service: str, engine: Engine, now_ns: int) -> None:
        """A service is placed on an engine that has not started."""
        self._services.setdefault(service, _Service(used_ns=now_ns))
        engine.residences[service] = Residence.ABSENT

    def _place(
        self, service: str, engines: Iterable[Engine], idle_after_s: float | None, now_ns: int
    ) -> list[ResidencyAction]:
        """A service is wanted on engines, beside those that it is placed on."""
        known = self._services.setdefault(service, _Service(used_ns=now_ns))
        known.wanted, known.removed, known.error = True, False, None
        known.placed_idle_ns = known.idle_after_ns = _nanoseconds(idle_after_s)
        engines = list(engines)
        for engine in engines:
            engine.residences.setdefault(service, Residence.ABSENT)
        return self._settle(service, engines)

    def _want(self, service: str, loaded: bool, engines: Iterable[Engine]) -> list[ResidencyAction]:
        """A service is to be loaded where it is placed, or unloaded."""
        known = self._services.get(service)
        if known is None:
            return []
        known.wanted = loaded
        known.woken &= loaded
        engines = list(engines)
        if loaded:
            known.error = None
            for engine in engines:
                if engine.residences.get(service) is Residence.FAILED:
                    engine.residences[service] = Residence.ABSENT
        else:
            known.idle_after_ns = known.placed_idle_ns
        return self._settle(service, engines)

    def _keep(
        self, service: str, idle_after_s: float | None, engines: Sequence[Engine], now_ns: int
    ) -> list[ResidencyAction]:
        """A service is to stay loaded from now on, until it had no request for some time."""
        known = self._services.get(service)
        if known is None:
            return []
        known.idle_after_ns, known.used_ns = _nanoseconds(idle_after_s), now_ns
        return self._unload_idle(service, known, engines, now_ns)

    def _remove(self, service: str, engines: Iterable[Engine]) -> list[ResidencyAction]:
        """A service is not wanted any more."""
        known = self._services.get(service)
        if known is None:
            return []
        known.wanted, known.removed = False, True
        return self._settle(service, engines)

    def submitted(self, service: str, engines: Iterable[Engine]) -> list[ResidencyAction]:
        """A request came, which wakes up a service that is not loaded."""
        known = self._services.get(service)
        if known is None:
            return []
        known.unfinished += 1
        if known.wanted or known.removed:
            return []
        known.woken = True
        return self._want(service, True, engines)

    def ended(self, service: str, engines: Iterable[Engine], now_ns: int) -> list[ResidencyAction]:
        """A request is over."""
        known = self._services.get(service)
        if known is None:
            return []
        known.unfinished -= 1
        known.used_ns = now_ns
        return [] if known.wanted or known.unfinished else self._settle(service, engines)

    def ticked(self, engines: Iterable[Engine], now_ns: int) -> list[ResidencyAction]:
        """Time passed: services that had no request for long are unloaded."""
        engines, actions = list(engines), list[ResidencyAction]()
        for name, known in self._services.items():
            actions += self._unload_idle(name, known, engines, now_ns)
        return actions

    def _unload_idle(
        self, service: str, known: _Service, engines: Sequence[Engine], now_ns: int
    ) -> list[ResidencyAction]:
        """Unload a service that had no request for too long."""
        idle = known.idle_after_ns is not None and now_ns - known.used_ns >= known.idle_after_ns
        # Loading may take longer than that.
        if known.wanted and idle and not known.unfinished and not self.loads(service, engines):
            return self._want(service, False, engines)
        return []

    def starts_with(self, engine: Engine) -> tuple[str, ...]:
        """What an engine that is started is to load: what is wanted or has requests still, which went on when
        an engine ended; or all, since it needs something."""
        placed = [name for name in engine.residences if not self._services[name].over]
        wanted = [name for name in placed if self._services[name].wanted or self._services[name].unfinished]
        sound = [name for name in wanted if engine.residences[name] is not Residence.FAILED]
        return tuple(sound or wanted or placed)

    def ready(self, engine: Engine, loaded: Iterable[str], now_ns: int) -> list[ResidencyAction]:
        """An engine has started, or was found, with these services; it gives up what nobody placed there."""
        loaded = set(loaded)
        actions: list[ResidencyAction] = [
            UnloadService(engine.name, engine.incarnation, name)
            for name in sorted(loaded - engine.residences.keys())
        ]
        for name in list(engine.residences):
            if name in loaded:
                engine.residences[name] = Residence.LOADED
                self._services[name].used_ns = now_ns
            actions += self._settle(name, [engine])
        return actions

    def stopped(self, engine: Engine) -> None:
        """An engine's process ended."""
        for name, residence in list(engine.residences.items()):
            if self._services[name].over:
                del engine.residences[name]
            elif residence is not Residence.FAILED:
                engine.residences[name] = Residence.ABSENT

    def _moved(
        self, service: str, engine: Engine, residence: Residence, now_ns: int, error: str | None = None
    ) -> list[ResidencyAction]:
        """An engine has loaded or unloaded a service, or failed to load it with ``error``."""
        known = self._services.get(service)
        if known is None or service not in engine.residences:
            return []
        engine.residences[service] = residence
        known.used_ns = now_ns
        known.error = error
        return self._settle(service, [engine])

    def forget_removed(self, engines: Iterable[Engine]) -> None:
        """Forget services that were removed and that no engine has any more."""
        engines = list(engines)
        for name, known in list(self._services.items()):
            if known.over and not any(name in engine.residences for engine in engines):
                del self._services[name]

    def state(self, service: str, engines: Iterable[Engine]) -> tuple[ServiceState, str | None]:
        """Where a service is in its life, and why it could not be loaded."""
        known = self._services.get(service)
        if known is None:
            return ServiceState.UNLOADED, None
        placed = [engine for engine in engines if service in engine.residences]
        residences = {engine.residences[service] for engine in placed}
        leaves = bool(residences & {Residence.LOADED, Residence.UNLOADING}) or known.unfinished > 0
        if not known.wanted and leaves:
            return ServiceState.DRAINING, known.error
        if any(engine.serves(service) and engine.takes_requests for engine in placed):
            return ServiceState.READY, known.error
        if known.error is not None and Residence.LOADING not in residences:
            return ServiceState.FAILED, known.error
        return (ServiceState.LOADING if known.wanted else ServiceState.UNLOADED), known.error

    def wants(self, service: str) -> bool:
        """Whether a service is to be loaded where it is placed."""
        known = self._services.get(service)
        return known is not None and known.wanted

    def idleness(self, service: str) -> tuple[float | None, int | None]:
        """After how many seconds without a request a service is unloaded (None: never), and since when it has
        none (None: it has some)."""
        known = self._services.get(service)
        if known is None:
            return None, None
        idle_after_s = None if known.idle_after_ns is None else known.idle_after_ns / 1e9
        return idle_after_s, None if known.unfinished else known.used_ns

    def loads(self, service: str, engines: Iterable[Engine]) -> bool:
        """Whether a running engine is loading a service."""
        return any(engine.residences.get(service) is Residence.LOADING for engine in engines)

    def _settle(self, service: str, engines: Iterable[Engine]) -> list[ResidencyAction]:
        """Tell engines what they lack, or have too much."""
        known = self._services[service]
        actions = list[ResidencyAction]()
        for engine in engines:
            residence = engine.residences.get(service)
            if residence is None:
                continue
            if engine.state not in (EngineState.READY, EngineState.DRAINING) or not engine.runs:
                if known.over:
                    del engine.residences[service]
            elif known.wanted and residence is Residence.ABSENT:
                engine.residences[service] = Residence.LOADING
                actions.append(LoadService(engine.name, engine.incarnation, service, known.woken))
            elif not known.wanted and residence is Residence.LOADED and not known.unfinished:
                engine.residences[service] = Residence.UNLOADING
                actions.append(UnloadService(engine.name, engine.incarnation, service))
            elif known.removed and residence in (Residence.ABSENT, Residence.FAILED):
                del engine.residences[service]
        return actions


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
