"""Data sheets of devices: memory, bandwidth, peak rates, links, and efficiencies of kernels.

The efficiencies of A100-80, H100, H200, L40S and RTX 4090 are fits to measured kernels
(``benchmarks/latency_models --fit``); those of ``cpu`` are fitted to steps of Shoal's engine. Other
devices have those of the most similar device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from shoal.core import ConfigError
from shoal.forecast.roofline_ops import Efficiencies, Efficiency, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of device."""

    name: str
    """In lower case."""
    memory_bytes: int
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    flops: float
    """Dense 16-bit matrix operations per second."""
    host_bytes_per_s: float
    """Rate at which weights come from host memory: of copies from pinned memory over PCIe, of copies from the
    page cache on CPUs."""
    link: Link
    """Between the devices of a node."""
    efficiencies: Efficiencies


_GIB = 2**30
_POINTWISE = Efficiency(1.0, 1.0, 2.11e-6)
"""Measured only on the RTX 4090."""

_A100 = Efficiencies(
    matmul=Efficiency(0.859, 0.764, 5.77e-6, 1.6),
    prefill=Efficiency(0.583, 0.432, 1.048e-5, row_s=3.326e-7),
    decode=Efficiency(1.0, 0.708, 1.834e-5, row_s=3.89e-8),
    experts=Efficiency(0.427, 0.857, 4.111e-5),
    pointwise=_POINTWISE,
)
_H100 = Efficiencies(
    matmul=Efficiency(0.812, 0.885, 3.52e-6, 3.22),
    prefill=Efficiency(0.696, 0.413, 1.304e-5, row_s=1.26e-8),
    decode=Efficiency(1.0, 0.903, 1.168e-5, row_s=4.46e-8),
    experts=Efficiency(0.629, 0.954, 4.099e-5),
    pointwise=_POINTWISE,
)
_H200 = Efficiencies(
    matmul=Efficiency(0.808, 0.837, 3.79e-6, 3.31),
    prefill=Efficiency(0.691, 0.305, 1.302e-5, row_s=7e-10),
    decode=Efficiency(1.0, 0.854, 1.166e-5, row_s=4.66e-8),
    experts=Efficiency(0.609, 1.0, 4.717e-5),
    pointwise=_POINTWISE,
)
_L40S = Efficiencies(
    matmul=Efficiency(0.657, 0.802, 1.57e-6, 2.15),
    prefill=Efficiency(0.547, 1.0, 6.81e-6, row_s=1.281e-7),
    decode=Efficiency(1.0, 0.828, 1.004e-5, row_s=1.06e-8),
    experts=Efficiency(0.75, 0.859, 1.876e-5),
    pointwise=_POINTWISE,
)
_RTX_4090 = Efficiencies(
    matmul=Efficiency(0.97, 0.892, 0.0, 2.12),
    prefill=Efficiency(1.0, 0.367, 7.84e-6),
    decode=Efficiency(1.0, 0.918, 1.234e-5, row_s=1.975e-7),
    experts=_L40S.experts,
    pointwise=_POINTWISE,
)
# Fitted to steps of Shoal's engine with two models of 135M and 270M in bfloat16 (experts: a guess). The start
# of decode attention includes all that a layer takes besides matrix products and KV.
_CPU = Efficiencies(
    matmul=Efficiency(0.94, 1.0, 0.0, 2.4),
    prefill=Efficiency(0.8, 0.9, 3e-6, row_s=6.1e-5),
    decode=Efficiency(1.0, 1.0, 8.2e-5, row_s=1.17e-5),
    experts=Efficiency(0.5, 0.9, 1e-4),
    pointwise=Efficiency(1.0, 0.5, 0.0),
)

_A100_NVLINK = Link(104e9, 5.06e-6, 2.2e-7)
_A800_NVLINK = Link(69e9, 5.06e-6, 2.2e-7)
_H100_NVLINK = Link(200e9, 4.36e-6, 1.8e-7)
_H200_NVLINK = Link(204e9, 4.54e-6, 9e-8)
_V100_NVLINK = Link(52e9, 5.06e-6, 2.2e-7)
_PCIE = Link(9.41e9, 5.36e-6, 3.29e-6, 1.67)
# Two devices without a bridge; fitted to a step of vLLM with 2,048 prompt tokens, which took 357 ms.
_PCIE_5 = Link(16e9, 2e-5, 3.29e-6, 1.67)
_SHARED_MEMORY = Link(5e9, 5e-5, 1e-5)

# About 80% of the nominal rate of 16 lanes.
_PCIE_3_HOST, _PCIE_4_HOST, _PCIE_5_HOST = 12e9, 25e9, 50e9
_PAGE_CACHE = 8e9


def _device(
    name: str,
    gib: int,
    bandwidth: float,
    flops: float,
    host_bytes_per_s: float,
    link: Link,
    efficiencies: Efficiencies,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory_bytes=gib * _GIB,
        bandwidth=bandwidth,
        flops=flops,
        host_bytes_per_s=host_bytes_per_s,
        link=link,
        efficiencies=efficiencies,
    )


_SPECS = [
    _device("a100-40", 40, 1555e9, 312e12, _PCIE_4_HOST, _A100_NVLINK, _A100),
    _device("a100-80", 80, 2039e9, 312e12, _PCIE_4_HOST, _A100_NVLINK, _A100),
    _device("a800", 80, 2039e9, 312e12, _PCIE_4_HOST, _A800_NVLINK, _A100),
    _device("h100", 80, 3350e9, 989e12, _PCIE_5_HOST, _H100_NVLINK, _H100),
    _device("h200", 141, 4800e9, 989e12, _PCIE_5_HOST, _H200_NVLINK, _H200),
    _device("l40s", 48, 864e9, 362e12, _PCIE_4_HOST, _PCIE, _L40S),
    _device("rtx-pro-6000", 96, 1792e9, 504e12, _PCIE_5_HOST, _PCIE_5, _L40S),
    _device("rtx-4090", 24, 1008e9, 165.2e12, _PCIE_4_HOST, _PCIE, _RTX_4090),
    _device("rtx-3090", 24, 936e9, 71e12, _PCIE_4_HOST, _PCIE, _RTX_4090),
    _device("v100", 32, 900e9, 125e12, _PCIE_3_HOST, _V100_NVLINK, _A100),
    _device("cpu", 16, 30e9, 418e9, _PAGE_CACHE, _SHARED_MEMORY, _CPU),
]

DEVICE_SPECS: Mapping[str, DeviceSpec] = {spec.name: spec for spec in _SPECS}
"""By name. ``cpu`` is two cores of a Zen 4, measured at 209 billion bfloat16 products per second."""


def find_device_spec(name: str) -> DeviceSpec | None:
    """The device called ``name``, ignoring case, spaces, dashes and underscores; None if unknown."""
    plain = _plain(name)
    return next((spec for key, spec in DEVICE_SPECS.items() if _plain(key) == plain), None)


def device_spec(name: str) -> DeviceSpec:
    """As ``find_device_spec``, but raises a ConfigError that lists all devices if unknown."""
    spec = find_device_spec(name)
    if spec is None:
        # For the name of a family, such as a100, suggest its members, not names with a similar spelling.
        family = [key for key in DEVICE_SPECS if _plain(name) and _plain(key).startswith(_plain(name))]
        near = family or get_close_matches(name.lower(), DEVICE_SPECS, n=1)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ConfigError(f"device {name!r} is not known; {hint}possible are {', '.join(DEVICE_SPECS)}")
    return spec


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
