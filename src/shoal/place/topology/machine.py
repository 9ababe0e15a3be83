"""CPU devices of this machine (memory by NUMA node), and its network link."""

import re
from pathlib import Path

import psutil

from shoal.core.cluster import Device, Link

CPU_LINK = Link(20e9, 1e-6)
"""Between NUMA nodes: rate of a copy by one core."""
_NETWORK_LATENCY_S = 50e-6
_SLOWEST_NETWORK = 1.25e9
_ACCOUNTED = 0.9
"""NUMA nodes are ignored if they account for less than this share of the memory."""
_NODE = re.compile(r"node(\d+)")
_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")


def cpu_devices(host: str, root: Path = Path("/")) -> list[Device]:
    """A device per NUMA node with memory; a single one if nodes do not account for all memory.

    root: with ``/sys``.
    """
    total_bytes = psutil.virtual_memory().total
    sizes = _memory_by_node(root)
    if sum(sizes.values()) < _ACCOUNTED * total_bytes:
        sizes = {0: total_bytes}
    return [
        Device(name=f"{host}-cpu{node}", kind="cpu", host=host, memory_bytes=size)
        for node, size in sorted(sizes.items())
    ]


def network_link() -> Link:
    """The fastest interface that is up; 10 Gbit/s if speeds are unknown."""
    speeds = [stats.speed for name, stats in psutil.net_if_stats().items() if stats.isup and name != "lo"]
    return Link(
        max([speed * 1e6 / 8 for speed in speeds if speed > 0], default=_SLOWEST_NETWORK), _NETWORK_LATENCY_S
    )


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    return (root / "proc/driver/nvidia/version").exists()


def _memory_by_node(root: Path) -> dict[int, int]:
    """Bytes by node number."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node*"):
        number = _NODE.fullmatch(folder.name)
        try:
            total = _TOTAL.search((folder / "meminfo").read_text())
        except OSError:
            continue
        if number and total and int(total[1]):
            found[int(number[1])] = int(total[1]) * 1024
    return found
