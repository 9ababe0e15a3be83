"""A cluster description with the memory bandwidth of its kinds of devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core import ConfigError
from shoal.core.cluster import ClusterSpec
from shoal.forecast.device_specs import DEVICE_SPECS, find_device_spec


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices and links, and bandwidths without a device spec."""

    cluster: ClusterSpec
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Memory bandwidth by kind; kinds with a device spec may be left out."""

    def speeds(self) -> dict[str, float]:
        """Rate in bytes per second at which each kind reads weights; raises ConfigError for an unknown kind.

        From a device spec: the bandwidth that large kernels reach.
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
        """As ``speeds``, without unknown kinds."""
        speeds = dict(self.bytes_per_s)
        for kind in dict.fromkeys(device.kind for device in self.cluster.devices):
            spec = find_device_spec(kind)
            if kind not in speeds and spec is not None:
                speeds[kind] = spec.bandwidth * spec.efficiencies.matmul.memory
        return speeds
