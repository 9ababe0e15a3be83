"""Memory check: whether the weights and the minimum KV of services fit on a group of devices."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    pinned: bool = False
    """Whether its weights never leave."""

    @property
    def weights_name(self) -> str:
        return self.weights or self.model.name


@dataclass(slots=True)
class _WeightsNeed:
    """What weights and the services that share them need of each device, in bytes."""

    weight_bytes: int
    kv_bytes: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Checks which services fit together, from the sizes of their models."""

    services: Mapping[str, PlacedService]
    utilisation: float = 0.9
    """Share of a device's memory for weights and KV."""
    weights_limit_bytes: int | None = None
    """Memory of each device for weights; services with more take turns in it. None: all weights stay."""
    _known: dict[tuple[tuple[str, ...], int, int], bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of ``fits``."""
    _sizes: dict[tuple[str, int], tuple[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of names and sizes of weights, by service and tensor-parallel size."""

    def left_bytes(self, services: Collection[str], memory_bytes: int, tp: int) -> int:
        """Bytes left for KV on each of ``tp`` devices; negative: the weights do not fit."""
        limit = self.limit_bytes(services, tp)
        weights = sum(self.weight_bytes(services, tp).values()) if limit is None else limit
        return int(memory_bytes * self.utilisation) - weights

    def limit_bytes(self, services: Collection[str], tp: int) -> int | None:
        """Memory for weights on each of ``tp`` devices where they come and go; None: all of them stay."""
        limit = self.weights_limit_bytes
        return None if limit is None or sum(self.weight_bytes(services, tp).values()) <= limit else limit

    def weight_bytes(self, services: Iterable[str], tp: int) -> dict[str, int]:
        """Size on each of ``tp`` devices, by name of the weights."""
        return dict(self._weights(name, tp) for name in services)

    def _weights(self, service: str, tp: int) -> tuple[str, int]:
        """Name and size of the weights of a service."""
        known = self._sizes.get((service, tp))
        if known is None:
            placed = self.services[service]
            known = self._sizes[service, tp] = (placed.weights_name, placed.model.weight_bytes(tp))
        return known

    def fits(self, services: Sequence[str], memory_bytes: int, tp: int) -> bool:
        """Whether the weights fit, with room for the minimum KV.

        Where weights come and go, the pinned ones and the largest other must fit into the limit, and the
        minimum KV is that of the services whose weights can be there together: KV of others is swapped out.
        """
        key = tuple(services), memory_bytes, tp
        if key not in self._known:
            self._known[key] = self._fits(services, memory_bytes, tp)
        return self._known[key]

    def _fits(self, services: Sequence[str], memory_bytes: int, tp: int) -> bool:
        if any(self.services[name].model.heads % tp for name in services):
            return False
        needs = self._needs(services, tp)
        limit = self.limit_bytes(services, tp)
        if limit is not None:
            if _pinned_and_largest(needs, lambda need: need.weight_bytes) > limit:
                return False
            floor = _pinned_and_largest(needs, lambda need: need.kv_bytes)
        else:
            floor = sum(need.kv_bytes for need in needs)
        return self.left_bytes(services, memory_bytes, tp) >= floor

    def _needs(self, services: Sequence[str], tp: int) -> list[_WeightsNeed]:
        needs = {name: _WeightsNeed(size) for name, size in self.weight_bytes(services, tp).items()}
        for service in map(self.services.__getitem__, services):
            need = needs[service.weights_name]
            need.kv_bytes += service.kv_floor_tokens * service.model.kv_bytes_per_token(tp)
            need.pinned = need.pinned or service.pinned
        return list(needs.values())

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
                + self.limit_in_words
            )

    @property
    def limit_in_words(self) -> str:
        """For the end of an error message; empty without a limit."""
        limit = self.weights_limit_bytes
        return "" if limit is None else f", and weights.memory is {limit / 2**30:.1f} GiB"


def _pinned_and_largest(needs: Sequence[_WeightsNeed], size: Callable[[_WeightsNeed], int]) -> int:
    """Sizes of pinned weights, and the largest of the others."""
    pinned = sum(size(need) for need in needs if need.pinned)
    return pinned + max((size(need) for need in needs if not need.pinned), default=0)


def pools(cluster: ClusterSpec) -> list[list[Device]]:
    """Devices that may form groups: of one kind in one host."""
    found: dict[tuple[str, str], list[Device]] = {}
    for device in cluster.devices:
        found.setdefault((device.host, device.kind), []).append(device)
    return list(found.values())
