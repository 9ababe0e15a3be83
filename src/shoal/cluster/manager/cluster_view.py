"""What may be read of a cluster's state: engines, services, and where requests are."""

from collections.abc import Mapping, Sequence

from shoal.cluster.manager.assignment import Assignment
from shoal.cluster.manager.quarantine import Quarantine
from shoal.cluster.manager.residency import Residency
from shoal.cluster.manager.state import Engine, ManagedCall, Residence
from shoal.cluster.status import EngineStatus, ServiceStatus


class ClusterView:
    """Reads the state that a manager keeps; nothing here changes it.

    engines, calls: all, by name and by id.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        calls: Mapping[str, ManagedCall],
        residency: Residency,
        assignment: Assignment,
        quarantine: Quarantine,
    ) -> None:
        self._all_engines = engines
        self._all_calls = calls
        self._services = residency
        self._dispatched = assignment
        self._suspects = quarantine

    @property
    def engines(self) -> Sequence[EngineStatus]:
        """All engines, in the order in which they were added, without what the router knows of them."""
        return [engine.status() for engine in self._all_engines.values()]

    @property
    def services(self) -> Mapping[str, ServiceStatus]:
        """All services that are placed, or that requests wait for."""
        names = dict.fromkeys([*self._services.names, *self._dispatched.waiting.services])
        return {name: self.service(name) for name in names}

    def service(self, name: str) -> ServiceStatus:
        """One service; zeros if it is unknown."""
        engines = self.engines_of(name)
        declared = [engine for engine in self._all_engines.values() if name in engine.residences]
        state, error = self._services.state(name, declared)
        active = [engine for engine in engines if engine.active]
        idle_after_s, idle_since_ns = self._services.idleness(name)
        return ServiceStatus(
            ready=sum(engine.accepts_requests and engine.serves(name) for engine in engines),
            wanted=len(active) if self._services.wants(name) else 0,
            waiting=self.waiting(name),
            loading=sum(engine.residences[name] is Residence.LOADING for engine in engines),
            state=state,
            error=error,
            idle_after_s=idle_after_s,
            idle_since_ns=idle_since_ns,
            batches=self._dispatched.batches_formed[name],
            batched_requests=self._dispatched.batched_calls[name],
        )

    def loads(self, service: str, engine: str) -> bool:
        """Whether an active engine is to load a service and has not done so."""
        found = self._all_engines.get(engine)
        if found is None or not found.active or not self._services.wants(service):
            return False
        return found.residences.get(service) in (Residence.ABSENT, Residence.LOADING, Residence.UNLOADING)

    def has(self, service: str, engine: str) -> bool:
        """Whether an engine has loaded a service that is placed on it."""
        found = self._all_engines.get(engine)
        return found is not None and found.serves(service)

    def waits_for_load(self, service: str) -> bool:
        """Whether requests of a service wait until running engines have loaded it."""
        engines = self.engines_of(service)
        if any(engine.accepts_requests and engine.serves(service) for engine in engines):
            return False
        # A service that is being unloaded is loaded again after that.
        loading = (Residence.LOADING, Residence.UNLOADING)
        return any(engine.residences[service] in loading for engine in engines)

    def waiting(self, service: str) -> int:
        """Number of requests of a service without an engine."""
        quarantined = sum(call.service == service for call in self._suspects.pending)
        return self._dispatched.waiting.count(service) + quarantined

    @property
    def has_waiting(self) -> bool:
        return bool(self._dispatched.waiting) or bool(self._suspects.pending)

    def owner(self, request: str) -> str | None:
        """Name of the engine that has a request; None: none, or the request is unknown."""
        call = self._all_calls.get(request)
        return None if call is None or call.engine is None else call.engine.name

    def engines_of(self, service: str) -> list[Engine]:
        """The engines on which a service is placed."""
        return [engine for engine in self._all_engines.values() if engine.places(service)]
