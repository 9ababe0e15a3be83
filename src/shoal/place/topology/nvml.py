"""NVIDIA GPUs and their links, through NVML (module ``pynvml`` of the package ``nvidia-ml-py``)."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import combinations
from typing import Any, TypeVar

from shoal.core.cluster import Device, Link
from shoal.forecast.device_specs import DEVICE_SPECS

T = TypeVar("T")

_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""PCIe per lane, one direction, by generation."""
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""NVLink per link, one direction, by generation."""
_NVLINK_LATENCY_S = 5e-6
_LATENCY_S = {0: 5e-6, 10: 10e-6, 20: 12e-6, 30: 15e-6, 40: 20e-6}
"""By the nearest common ancestor: one board, one bridge, several, a host bridge, a NUMA node."""
_FARTHEST_LATENCY_S = 30e-6
_SWITCH = 2
"""NVML's number for an NVSwitch at the other end of a link."""


@dataclass(frozen=True, slots=True)
class Gpus:
    devices: tuple[Device, ...]
    """In the driver's order."""
    links: dict[frozenset[str], Link]
    """Of every pair."""
    bytes_per_s: dict[str, float]
    """Memory bandwidth by kind, for kinds without a device spec."""


def load_nvml() -> Any:
    """The module, or None if it is not installed."""
    try:
        return import_module("pynvml")
    except ImportError:
        return None


def find_gpus(nvml: Any, host: str) -> Gpus:
    """All GPUs; none without a driver. nvml: the module ``pynvml``."""
    with _opened(nvml) as opened:
        if not opened:
            return Gpus((), {}, {})
        return _Reader(nvml, host).gpus()


@contextmanager
def _opened(nvml: Any) -> Iterator[bool]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        nvml.nvmlShutdown()


class _Reader:
    """Queries the driver; unknown values get defaults."""

    def __init__(self, nvml: Any, host: str) -> None:
        self._nvml = nvml
        self._host = host
        count = nvml.nvmlDeviceGetCount()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def gpus(self) -> Gpus:
        nvml = self._nvml
        devices, speeds = [], {}
        for index, handle in enumerate(self._handles):
            kind, known = _kind_of(_text(nvml.nvmlDeviceGetName(handle)))
            memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
            name = f"{self._host}-gpu{index}"
            devices.append(Device(name=name, kind=kind, host=self._host, memory_bytes=memory))
            speed = None if known else self._memory_bytes_per_s(handle)
            if speed:
                speeds[kind] = speed
        links = {
            frozenset((devices[i].name, devices[j].name)): self._link(self._handles[i], self._handles[j])
            for i, j in combinations(range(len(devices)), 2)
        }
        return Gpus(tuple(devices), links, speeds)

    def _query(self, query: Callable[[], T], default: T) -> T:
        try:
            return query()
        except self._nvml.NVMLError:
            return default

    def _memory_bytes_per_s(self, handle: Any) -> float:
        """From the bus width and the clock, at double data rate."""
        nvml = self._nvml
        bits = self._query(partial(nvml.nvmlDeviceGetMemoryBusWidth, handle), 0)
        megahertz = self._query(partial(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM), 0)
        return 2 * megahertz * 1e6 * bits / 8

    def _link(self, first: Any, second: Any) -> Link:
        lanes = min(self._nvlinks(first, second), self._nvlinks(second, first))
        if lanes:
            return Link(lanes, _NVLINK_LATENCY_S)
        nvml = self._nvml
        level = self._query(partial(nvml.nvmlDeviceGetTopologyCommonAncestor, first, second), -1)
        rate = min(self._pcie_bytes_per_s(first), self._pcie_bytes_per_s(second))
        return Link(rate, _LATENCY_S.get(level, _FARTHEST_LATENCY_S))

    def _nvlinks(self, own: Any, other: Any) -> float:
        """Bytes per second of the NVLinks from one GPU to another, or to switches."""
        nvml = self._nvml
        other_bus = _bus_id(nvml.nvmlDeviceGetPciInfo(other))
        total = 0.0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not self._query(partial(nvml.nvmlDeviceGetNvLinkState, own, link), 0):
                continue
            kind = self._query(partial(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, own, link), None)
            end = self._query(partial(nvml.nvmlDeviceGetNvLinkRemotePciInfo, own, link), None)
            if kind == _SWITCH or (end is not None and _bus_id(end) == other_bus):
                generation = self._query(partial(nvml.nvmlDeviceGetNvLinkVersion, own, link), 0)
                total += _NVLINK_BYTES_PER_S.get(generation, max(_NVLINK_BYTES_PER_S.values()))
        return total

    def _pcie_bytes_per_s(self, handle: Any) -> float:
        nvml = self._nvml
        generation = self._query(partial(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle), 3)
        lanes = self._query(partial(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle), 16)
        return _LANE_BYTES_PER_S.get(generation, max(_LANE_BYTES_PER_S.values())) * lanes


def _bus_id(info: Any) -> str:
    return _text(info.busId).lower()


def _kind_of(name: str) -> tuple[str, bool]:
    """The longest known kind contained in the driver's name, and True; else the name in lower case, and
    False."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    known = [kind for kind in DEVICE_SPECS if kind.replace("-", "") in plain]
    if known:
        return max(known, key=len), True
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia")).strip("-"), False


def _text(value: str | bytes) -> str:
    """Older versions of the module return bytes."""
    return value.decode() if isinstance(value, bytes) else value
