"""A described cluster, and how fast its kinds of devices go through memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core import ConfigError
from shoal.core.cluster import ClusterSpec
from shoal.forecast.device_specs import DEVICE_SPECS, find_device_spec


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices and links, and what no data sheet on record says of them."""

    cluster: ClusterSpec
    """The devices and their links."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """By kind, how fast a device reads its memory; kinds with a data sheet on record may be left out."""

    def speeds(self) -> dict[str, float]:
        """How fast each kind goes through weights, bytes per second; raises ConfigError for one of which
        neither a speed nor a data sheet is known.

        From a data sheet it is the bandwidth that large kernels reach.
        """
        speeds = self.known_speeds()
        for kind in dict.fromkeys(device.kind for device in self.cluster.devices):
            if kind not in speeds:
                raise ConfigError(
                    f"nothing is known of devices of kind {kind!r}: write how fast they read their memory, "
                    f"as in `speeds: {{{kind}: 900GB}}` (a second), or a kind on record: "
                    + ", ".join(DEVICE_SPECS)
                )
        return speeds

    def known_speeds(self) -> dict[str, float]:
        """The same of the kinds of which it is known."""
        speeds = dict(self.bytes_per_s)
        for kind in dict.fromkeys(device.kind for device in self.cluster.devices):
            spec = find_device_spec(kind)
            if kind not in speeds and spec is not None:
                speeds[kind] = spec.bandwidth * spec.efficiencies.matmul.memory
        return speeds
