"""Detects the topology of this machine, as a cluster of one host."""

import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.cluster import ClusterSpec, Link
from shoal.place.topology.machine import CPU_LINK, cpu_devices, network_link
from shoal.place.topology.nvml import Gpus, find_gpus
from shoal.place.topology.topology import Topology


def detect(nvml: Any, host: str = "", root: Path = Path("/")) -> Topology:
    """This machine's GPUs and their links, or its CPUs if it has no GPU.

    nvml: the module ``pynvml``, or None. host: name of the machine, its own by default. root: with ``/sys``.
    """
    host = host or socket.gethostname().split(".")[0]
    found = Gpus((), {}, {}) if nvml is None else find_gpus(nvml, host)
    if not found.devices:
        cluster = ClusterSpec(devices=cpu_devices(host, root), host_link=CPU_LINK, network=network_link())
        return Topology(cluster)
    host_link = _commonest(found.links)
    cluster = ClusterSpec(
        devices=found.devices,
        host_link=host_link,
        network=network_link(),
        pairs={pair: link for pair, link in found.links.items() if link != host_link},
    )
    return Topology(cluster, found.bytes_per_s)


def _commonest(links: Mapping[frozenset[str], Link]) -> Link:
    """The most common link; ``CPU_LINK`` without pairs."""
    return Counter(links.values()).most_common(1)[0][0] if links else CPU_LINK
