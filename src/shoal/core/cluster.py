"""What a cluster is made of: devices, the hosts they are in, and the links between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of two devices."""

    bytes_per_s: float
    """How much it carries."""
    latency_s: float
    """How long the first byte takes."""

    def __post_init__(self) -> None:
        """Refuse a link that carries nothing; raises ConfigError."""
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ConfigError(f"a link carries bytes and takes no negative time, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a cluster."""

    name: str
    """Its name in the cluster."""
    kind: str
    """What it is, such as ``a800`` or ``cpu``: devices of a kind compute equally fast."""
    host: str
    """The machine that it is in."""
    memory_bytes: int
    """All of its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Devices and their links.

    Two devices have the link given for the pair, else ``host_link`` in one host, ``network`` between two.
    Raises ConfigError for no devices, for names that are not unique, and for links of unknown devices.
    """

    devices: Sequence[Device]
    """All of them, by host."""
    host_link: Link
    """Between devices of one host."""
    network: Link
    """Between devices of different hosts."""
    pairs: Mapping[frozenset[str], Link] = field(default_factory=dict)
    """Links of pairs of devices, by the two names, where they are others."""

    def __post_init__(self) -> None:
        """Refuse what no cluster can be."""
        names = {device.name for device in self.devices}
        if not names:
            raise ConfigError("a cluster needs at least one device")
        if len(names) < len(self.devices):
            raise ConfigError("devices of a cluster must have different names")
        for pair in self.pairs:
            if len(pair) != 2 or not pair <= names:
                raise ConfigError(f"a link joins two devices of the cluster, got {', '.join(sorted(pair))}")

    def link(self, first: Device, second: Device) -> Link:
        """The link between two different devices."""
        own = self.pairs.get(frozenset((first.name, second.name)))
        if own is not None:
            return own
        return self.host_link if first.host == second.host else self.network

    def hosts(self) -> Mapping[str, Sequence[Device]]:
        """The devices of each host, in their order."""
        found: dict[str, list[Device]] = {}
        for device in self.devices:
            found.setdefault(device.host, []).append(device)
        return found
