"""The services of a scheduler, which may come and go while it runs."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.core import ConfigError
from shoal.kvcache import BlockPool
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.request_state import RequestState
from shoal.schedule.service_state import ServiceState, new_service_state
from shoal.schedule.validation import ServiceLimits


class ServiceRegistry:
    """Owner of the services' states; the pool's layout has all of them.

    due_ns: when a waiting request starves.
    """

    def __init__(
        self,
        pool: BlockPool,
        options: SchedulerOptions,
        due_ns: Callable[[RequestState], int],
        services: Mapping[str, ServiceLimits],
    ) -> None:
        self.states: dict[str, ServiceState] = {}
        """All services by name."""
        self.limits: dict[str, ServiceLimits] = {}
        """What is allowed of those that take new requests."""
        self.max_running = 1
        """Most requests that hold KV at once."""
        self._pool = pool
        self._options = options
        self._due_ns = due_ns
        for name, limits in services.items():
            self._enter(name, limits)
        self.refresh()

    @property
    def running(self) -> int:
        """Requests that hold memory."""
        return sum([len(state.running) for state in self.states.values()])

    def add(self, service: str, limits: ServiceLimits) -> None:
        """A service comes, of which the pool has a view by now."""
        self._enter(service, limits)
        self.refresh()

    def _enter(self, service: str, limits: ServiceLimits) -> None:
        self.states[service] = new_service_state(self._pool, service, limits, self._options, self._due_ns)
        self.limits[service] = limits

    def close(self, service: str) -> None:
        """A service takes no new requests."""
        self.limits.pop(service, None)

    def remove(self, service: str) -> None:
        """A service without requests goes, of which the pool has no view any more."""
        self.close(service)
        del self.states[service]
        self.refresh()

    def refresh(self) -> None:
        """Follow a change of services, or of the pool's layout."""
        views = self._pool.layout.services
        for name, state in self.states.items():
            state.layout = views[name]
        for state in self.states.values():
            state.companions = self._companions(state) if self._options.co_batch else ()
        blocks = max(map(self._pool.max_blocks, self.states), default=1)
        self.max_running = self._options.resolve_max_running(blocks)

    def _companions(self, state: ServiceState) -> list[str]:
        """Other services on the same weights, if all of their blocks are addressed alike.

        Raises ConfigError where they cannot share weights, because their KV blocks differ.
        """
        if state.weights is None or self._pool.layout.kind != "merged":
            return []
        others = [
            other for other in self.states.values() if other is not state and other.weights == state.weights
        ]
        for other in others:
            if replace(other.layout, service=state.service) != state.layout:
                raise ConfigError(
                    f"services {state.service} and {other.service} cannot share weights, because their KV"
                    " blocks differ; name other weights for one of them"
                )
        return [other.service for other in others]
