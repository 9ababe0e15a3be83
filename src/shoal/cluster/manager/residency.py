"""Loading and unloading of services on engines: on demand, by request, and when idle for too long."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.cluster.manager.actions import LoadService, UnloadService
from shoal.cluster.manager.events import (
    PlacementWanted,
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
    removed: bool = False
    """Whether it is to be deleted once it is unloaded."""
    placed_idle_ns: int | None = None
    """Idle time as placed; None: never unloaded."""
    idle_after_ns: int | None = None
    """Idle time in force until the next unload."""
    unfinished: int = 0
    woken: bool = False
    """Whether a request caused its loading."""
    used_ns: int = 0
    """When its last request ended, or it was loaded."""
    error: str | None = None

    @property
    def over(self) -> bool:
        """Whether no engine is to load it again, not even one that died with its requests."""
        return self.removed and not self.unfinished


class Residency:
    """Loads and unloads services on running engines.

    A service is unloaded from all engines together, once it has no requests. A request that comes before that
    keeps it loaded; one that comes later loads it again. An engine on which it is no longer placed unloads it
    once it has none of its requests.
    """

    def __init__(self) -> None:
        self._services: dict[str, _Service] = {}
        self._leaving: set[tuple[str, str]] = set()
        """(engine, service): services to unload from engines on which they are no longer placed."""

    @property
    def names(self) -> Sequence[str]:
        """All services, in the order of their first placement."""
        return list(self._services)

    def handle(
        self, event: ServiceEvent, engines: Mapping[str, Engine], now_ns: int
    ) -> list[ResidencyAction]:
        """Handle an event about a service; engines: all, by name."""
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
            case PlacementWanted():
                return self._change_placement(event, engines)
        engine = running_engine(engines, event)
        if engine is None:
            return []
        if isinstance(event, ServiceLoaded | ServiceUnloaded):
            engine.load.kv_tokens = dict(event.kv_tokens)
        if isinstance(event, ServiceLoaded):
            engine.load.learn(service, event.speed)
            engine.kv_formats[service] = event.kv_format
            return self._set_residence(service, engine, Residence.LOADED, now_ns)
        if isinstance(event, ServiceFailed):
            return self._set_residence(service, engine, Residence.FAILED, now_ns, event.error)
        return self._set_residence(service, engine, Residence.ABSENT, now_ns)

    def add(self, service: str, engine: Engine, now_ns: int) -> None:
        """Place a service on an engine that has not started."""
        self._services.setdefault(service, _Service(used_ns=now_ns))
        engine.residences[service] = Residence.ABSENT

    def _place(
        self, service: str, engines: Iterable[Engine], idle_after_s: float | None, now_ns: int
    ) -> list[ResidencyAction]:
        """Place a service on more engines."""
        known = self._services.setdefault(service, _Service(used_ns=now_ns))
        known.wanted, known.removed, known.error = True, False, None
        known.placed_idle_ns = known.idle_after_ns = _nanoseconds(idle_after_s)
        engines = list(engines)
        for engine in engines:
            self._place_on(service, engine)
        return self._settle(service, engines)

    def _place_on(self, service: str, engine: Engine) -> None:
        engine.residences.setdefault(service, Residence.ABSENT)
        engine.unplaced.discard(service)
        self._leaving.discard((engine.name, service))

    def _change_placement(
        self, event: PlacementWanted, engines: Mapping[str, Engine]
    ) -> list[ResidencyAction]:
        """Place a service on an engine more, or on one less, if another active engine has it."""
        service, engine = event.service, engines.get(event.engine)
        known = self._services.get(service)
        if engine is None or known is None or known.removed:
            return []
        if event.placed:
            self._place_on(service, engine)
            if engine.residences[service] is Residence.FAILED:
                engine.residences[service] = Residence.ABSENT
            return self._settle(service, [engine])
        if not engine.places(service) or not served_elsewhere(service, engine, engines.values()):
            return []
        engine.unplaced.add(service)
        if event.unload:
            self._leaving.add((engine.name, service))
        return self.unload_left(engines)

    def unload_left(self, engines: Mapping[str, Engine]) -> list[ResidencyAction]:
        """Unload services from engines on which they are no longer placed, where these need them no more."""
        actions = list[ResidencyAction]()
        for name, service in sorted(self._leaving):
            engine = engines.get(name)
            if engine is None or service not in engine.residences:
                self._leaving.discard((name, service))
            else:
                actions += self._settle(service, [engine])
        return actions

    def is_leaving(self, service: str, engine: Engine) -> bool:
        """Whether an engine is to unload a service that is no longer placed on it, and can."""
        if (engine.name, service) not in self._leaving:
            return False
        return any(
            residence is not Residence.UNLOADING
            for name, residence in engine.residences.items()
            if name != service
        )

    def _may_unload(self, service: str, engine: Engine) -> bool:
        """Whether an engine is to lose a service and nothing else. An engine needs at least one service."""
        return self.is_leaving(service, engine) and not engine.needs(service)

    def _forget(self, service: str, engine: Engine) -> None:
        """A service is no longer declared on an engine."""
        del engine.residences[service]
        engine.unplaced.discard(service)
        self._leaving.discard((engine.name, service))

    def _want(self, service: str, loaded: bool, engines: Iterable[Engine]) -> list[ResidencyAction]:
        """Load a service where it is placed, or unload it."""
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
        """Set a new idle time."""
        known = self._services.get(service)
        if known is None:
            return []
        known.idle_after_ns, known.used_ns = _nanoseconds(idle_after_s), now_ns
        return self._unload_idle(service, known, engines, now_ns)

    def _remove(self, service: str, engines: Iterable[Engine]) -> list[ResidencyAction]:
        known = self._services.get(service)
        if known is None:
            return []
        known.wanted, known.removed = False, True
        return self._settle(service, engines)

    def submitted(self, service: str, engines: Iterable[Engine]) -> list[ResidencyAction]:
        """A request came: load its service if it is unloaded."""
        known = self._services.get(service)
        if known is None:
            return []
        known.unfinished += 1
        if known.wanted or known.removed:
            return []
        known.woken = True
        return self._want(service, True, engines)

    def ended(self, service: str, engines: Iterable[Engine], now_ns: int) -> list[ResidencyAction]:
        known = self._services.get(service)
        if known is None:
            return []
        known.unfinished -= 1
        known.used_ns = now_ns
        return [] if known.wanted or known.unfinished else self._settle(service, engines)

    def ticked(self, engines: Iterable[Engine], now_ns: int) -> list[ResidencyAction]:
        """Time passed: unload idle services."""
        engines, actions = list(engines), list[ResidencyAction]()
        for name, known in self._services.items():
            actions += self._unload_idle(name, known, engines, now_ns)
        return actions

    def _unload_idle(
        self, service: str, known: _Service, engines: Sequence[Engine], now_ns: int
    ) -> list[ResidencyAction]:
        idle = known.idle_after_ns is not None and now_ns - known.used_ns >= known.idle_after_ns
        # Loading may take longer than the idle time.
        if known.wanted and idle and not known.unfinished and not self.is_loading(service, engines):
            return self._want(service, False, engines)
        return []

    def services_to_load(self, engine: Engine) -> tuple[str, ...]:
        """Services that a starting engine loads: those that are wanted or have requests, without failed ones.

        If none is left, the failed ones too, or all: an engine needs at least one service.
        """
        placed = [name for name in engine.residences if not self._services[name].over]
        wanted = [name for name in placed if self._services[name].wanted or self._services[name].unfinished]
        not_failed = [name for name in wanted if engine.residences[name] is not Residence.FAILED]
        return tuple(not_failed or wanted or placed)

    def ready(self, engine: Engine, loaded: Iterable[str], now_ns: int) -> list[ResidencyAction]:
        """An engine is ready with these services; those that are not placed there are unloaded."""
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
        for name, residence in list(engine.residences.items()):
            if self._services[name].over or self._may_unload(name, engine):
                self._forget(name, engine)
            elif residence is not Residence.FAILED:
                engine.residences[name] = Residence.ABSENT

    def _set_residence(
        self, service: str, engine: Engine, residence: Residence, now_ns: int, error: str | None = None
    ) -> list[ResidencyAction]:
        """An engine has loaded or unloaded a service, or failed with ``error``."""
        known = self._services.get(service)
        if known is None or service not in engine.residences:
            return []
        engine.residences[service] = residence
        known.used_ns = now_ns
        known.error = error
        return self._settle(service, [engine])

    def forget_removed(self, engines: Iterable[Engine]) -> None:
        """Delete removed services that no engine has any more."""
        engines = list(engines)
        for name, known in list(self._services.items()):
            if known.over and not any(name in engine.residences for engine in engines):
                del self._services[name]

    def state(self, service: str, engines: Iterable[Engine]) -> tuple[ServiceState, str | None]:
        """The state of a service, and why it could not be loaded."""
        known = self._services.get(service)
        if known is None:
            return ServiceState.UNLOADED, None
        placed = [engine for engine in engines if service in engine.residences]
        residences = {engine.residences[service] for engine in placed}
        draining = bool(residences & {Residence.LOADED, Residence.UNLOADING}) or known.unfinished > 0
        if not known.wanted and draining:
            return ServiceState.DRAINING, known.error
        if any(engine.serves(service) and engine.accepts_requests for engine in placed):
            return ServiceState.READY, known.error
        if known.error is not None and Residence.LOADING not in residences:
            return ServiceState.FAILED, known.error
        return (ServiceState.LOADING if known.wanted else ServiceState.UNLOADED), known.error

    def wants(self, service: str) -> bool:
        known = self._services.get(service)
        return known is not None and known.wanted

    def idleness(self, service: str) -> tuple[float | None, int | None]:
        """The idle time in seconds before an unload (None: never), and since when it is idle (None: it is
        not)."""
        known = self._services.get(service)
        if known is None:
            return None, None
        idle_after_s = None if known.idle_after_ns is None else known.idle_after_ns / 1e9
        return idle_after_s, None if known.unfinished else known.used_ns

    def is_loading(self, service: str, engines: Iterable[Engine]) -> bool:
        return any(engine.residences.get(service) is Residence.LOADING for engine in engines)

    def _settle(self, service: str, engines: Iterable[Engine]) -> list[ResidencyAction]:
        """Order the loads and unloads that engines need for a service."""
        known = self._services[service]
        actions = list[ResidencyAction]()
        for engine in engines:
            residence = engine.residences.get(service)
            if residence is None:
                continue
            leaves = self._may_unload(service, engine)
            if engine.state not in (EngineState.READY, EngineState.DRAINING) or not engine.runs:
                if known.over or leaves:
                    self._forget(service, engine)
            elif leaves and residence is Residence.LOADED:
                engine.residences[service] = Residence.UNLOADING
                actions.append(UnloadService(engine.name, engine.incarnation, service))
            elif leaves and residence in (Residence.ABSENT, Residence.FAILED):
                self._forget(service, engine)
            elif known.wanted and residence is Residence.ABSENT:
                engine.residences[service] = Residence.LOADING
                actions.append(LoadService(engine.name, engine.incarnation, service, known.woken))
            elif not known.wanted and residence is Residence.LOADED and not known.unfinished:
                engine.residences[service] = Residence.UNLOADING
                actions.append(UnloadService(engine.name, engine.incarnation, service))
            elif known.removed and residence in (Residence.ABSENT, Residence.FAILED):
                self._forget(service, engine)
        return actions


def served_elsewhere(service: str, engine: Engine, engines: Iterable[Engine]) -> bool:
    """Whether a service is placed on another active engine, which has not failed to load it."""
    return any(
        other is not engine
        and other.active
        and other.places(service)
        and other.residences[service] is not Residence.FAILED
        for other in engines
    )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
