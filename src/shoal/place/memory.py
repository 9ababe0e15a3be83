"""Memory check: whether the weights and the minimum KV of services fit on a group of devices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core import ConfigError
from shoal.core.cluster import ClusterSpec, Device
from shoal.forecast.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedService:
    """A service to place."""

    name: str
    model: ModelSpec
    weights: str | None = None
    """Services with the same value share weights on shared devices; None: the model's name."""
    kv_floor_tokens: int = 4096
    """Minimum KV, such as its context."""


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Checks which services fit together, from the sizes of their models."""

    services: Mapping[str, PlacedService]
    utilisation: float = 0.9
    """Share of a device's memory for weights and KV."""
    _known: dict[tuple[tuple[str, ...], int, int], bool] = field(default_factory=dict, compare=False)
    """Cache of ``fits``."""

    def left_bytes(self, services: Iterable[str], memory_bytes: int, tp: int) -> int:
        """Bytes left for KV on each of ``tp`` devices; negative: the weights do not fit."""
        placed = [self.services[name] for name in services]
        weights = {each.weights or each.model.name: each.model.weight_bytes(tp) for each in placed}
        return int(memory_bytes * self.utilisation) - sum(weights.values())

    def fits(self, services: Sequence[str], memory_bytes: int, tp: int) -> bool:
        """Whether the weights fit, with room for the minimum KV of all services."""
        key = tuple(services), memory_bytes, tp
        if key not in self._known:
            self._known[key] = self._fits(services, memory_bytes, tp)
        return self._known[key]

    def _fits(self, services: Sequence[str], memory_bytes: int, tp: int) -> bool:
        placed = [self.services[name] for name in services]
        if any(service.model.heads % tp for service in placed):
            return False
        floor = sum(service.kv_floor_tokens * service.model.kv_bytes_per_token(tp) for service in placed)
        return self.left_bytes(services, memory_bytes, tp) >= floor

    def least_tp(self, service: str, devices: Sequence[Device], largest: int) -> int | None:
        """The smallest power of two of devices on which a service fits alone; None: none."""
        memory = max(device.memory_bytes for device in devices)
        tp = 1
        while tp <= largest:
            if self.fits([service], memory, tp):
                return tp
            tp *= 2
        return None

    def require(self, cluster: ClusterSpec) -> None:
        """Raise ConfigError if services fit on no host of the cluster."""
        hosts = pools(cluster)
        unplaceable = [
            name
            for name in self.services
            if all(self.least_tp(name, pool, len(pool)) is None for pool in hosts)
        ]
        if unplaceable:
            raise ConfigError(
                f"no host has devices with memory for {', '.join(unplaceable)}; the weights take "
                + ", ".join(f"{self.services[n].model.weight_bytes() / 2**30:.1f} GiB" for n in unplaceable)
            )


def pools(cluster: ClusterSpec) -> list[list[Device]]:
    """Devices that may form groups: of one kind in one host."""
    found: dict[tuple[str, str], list[Device]] = {}
    for device in cluster.devices:
        found.setdefault((device.host, device.kind), []).append(device)
    return list(found.values())
