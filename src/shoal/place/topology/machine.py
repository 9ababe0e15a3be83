"""This machine without accelerators: its memory by NUMA node, and its network."""

import re
from pathlib import Path

import psutil

from shoal.core.cluster import Device, Link

CPU_LINK = Link(20e9, 1e-6)
"""Between NUMA nodes: what a copy by one core reaches."""
_NETWORK_LATENCY_S = 50e-6
_SLOWEST_NETWORK = 1.25e9
_ACCOUNTED = 0.9
"""Nodes with less of the memory than this are not all there is: memory was added later, say."""
_NODE = re.compile(r"node(\d+)")
_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")


def cpu_devices(host: str, root: Path = Path("/")) -> list[Device]:
    """A device for each NUMA node that has memory; one with all memory where nodes do not account for it.

    root: where ``/sys`` is.
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
    """The fastest interface that is up; 10 Gbit/s where none says how fast it is."""
    speeds = [stats.speed for name, stats in psutil.net_if_stats().items() if stats.isup and name != "lo"]
    return Link(
        max([speed * 1e6 / 8 for speed in speeds if speed > 0], default=_SLOWEST_NETWORK), _NETWORK_LATENCY_S
    )


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Whether the driver of NVIDIA's GPUs is loaded."""
    return (root / "proc/driver/nvidia/version").exists()


def _memory_by_node(root: Path) -> dict[int, int]:
    """Bytes by number of the node."""
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
