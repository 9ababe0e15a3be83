"""Services of a scheduler: adding and removing, which of them are co-batched, limit on running requests."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.core import ConfigError
from shoal.kvcache import BlockPool
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.service_limits import ServiceLimits
from shoal.schedule.service_state import ServiceState, new_service_state
from shoal.schedule.weights import Weights
from shoal.schedule.weights_options import WeightsOptions


class ServiceRegistry:
    """Owner of the services' states; the pool's layout has all of them."""

    def __init__(
        self,
        pool: BlockPool,
        options: SchedulerOptions,
        services: Mapping[str, ServiceLimits],
        weights: WeightsOptions,
    ) -> None:
        self.states: dict[str, ServiceState] = {}
        self.limits: dict[str, ServiceLimits] = {}
        """Of services that accept new requests."""
        self.max_running = 1
        """Limit on requests that hold KV at once, of services that can step."""
        self.weights = Weights(weights)
        self._pool = pool
        self._options = options
        for name, limits in services.items():
            self._add(name, limits)
        self.refresh()

    @property
    def running(self) -> int:
        """Number of running requests."""
        return sum([len(state.running) for state in self.states.values()])

    @property
    def steppable(self) -> Mapping[str, ServiceState]:
        """Services whose weights are on the device."""
        return self.weights.steppable

    def add(self, service: str, limits: ServiceLimits) -> None:
        """Add a service that the pool's layout already has."""
        self._add(service, limits)
        self.refresh()

    def _add(self, service: str, limits: ServiceLimits) -> None:
        state = new_service_state(self._pool, service, limits, self._options)
        self.weights.add(state, limits)
        self.states[service] = state
        self.limits[service] = limits

    def pin(self, service: str, pinned: bool) -> None:
        """As ``Weights.pin``."""
        if service not in self.states:
            known = ", ".join(sorted(self.states)) or "none"
            raise ConfigError(f"there is no service {service!r}; there are: {known}")
        self.weights.pin(service, pinned)

    def close(self, service: str) -> None:
        """Stop accepting requests of a service."""
        self.limits.pop(service, None)

    def remove(self, service: str) -> None:
        """Remove a service without requests that the pool's layout no longer has."""
        self.close(service)
        self.weights.remove(service)
        del self.states[service]
        self.refresh()

    def refresh(self) -> None:
        """Follow a change of the services or of the pool's layout."""
        views = self._pool.layout.services
        for name, state in self.states.items():
            state.layout = views[name]
        for state in self.states.values():
            state.companions = self._companions(state) if self._options.co_batch else ()
        blocks = max(map(self._pool.max_blocks, self.states), default=1)
        self.max_running = self._options.resolve_max_running(blocks)

    def _companions(self, state: ServiceState) -> list[str]:
        """Other services on the same weights, in the merged layout.

        Raises ConfigError if their KV blocks have different layouts.
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
