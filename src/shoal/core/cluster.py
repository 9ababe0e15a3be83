"""Cluster hardware: devices, their hosts, and the bandwidth and latency of the links between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices."""

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ConfigError(f"a link carries bytes and takes no negative time, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: str
    """Unique in the cluster."""
    kind: str
    """Such as ``a800`` or ``cpu``: devices of the same kind compute equally fast."""
    host: str
    memory_bytes: int
    """Total memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Devices and their links.

    A link given for a pair of devices comes first, then ``host_link`` inside a host, ``network`` between
    hosts. Raises ConfigError for no devices, for names that are not unique, and for links of unknown devices.
    """

    devices: Sequence[Device]
    """Sorted by host."""
    host_link: Link
    """Between devices of one host."""
    network: Link
    """Between devices of different hosts."""
    pairs: Mapping[frozenset[str], Link] = field(default_factory=dict)
    """Links that differ from these two, by the names of the two devices."""

    def __post_init__(self) -> None:
        names = {device.name for device in self.devices}
        if not names:
            raise ConfigError("a cluster needs at least one device")
        if len(names) < len(self.devices):
            raise ConfigError("devices of a cluster must have different names")
        for pair in self.pairs:
            if len(pair) != 2 or not pair <= names:
                raise ConfigError(f"a link joins two devices of the cluster, got {', '.join(sorted(pair))}")

    def link(self, first: Device, second: Device) -> Link:
        own = self.pairs.get(frozenset((first.name, second.name)))
        if own is not None:
            return own
        return self.host_link if first.host == second.host else self.network

    def hosts(self) -> Mapping[str, Sequence[Device]]:
        """Devices by host, in their order."""
        found: dict[str, list[Device]] = {}
        for device in self.devices:
            found.setdefault(device.host, []).append(device)
        return found
