"""What an engine uses of its machine: CPU time, memory, and of its GPU (UELLM's monitor, section 4.1)."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """Present use of a GPU by all processes, as its driver tells it."""

    utilisation: float
    """Share of the last moments in which a kernel ran, 0 to 1."""
    memory_bytes: int
    power_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """Use by the engine's process, without children that run (to find them takes milliseconds)."""

    cpu_s: float = 0.0
    """CPU time since its start; that of ended children included."""
    rss_bytes: int = 0
    """Memory in use."""
    device: DeviceUsage | None = None
    """None: it computes on CPUs, or the driver cannot be asked."""


def measure_usage(device: str) -> ProcessUsage:
    """The usage of this process; device: the engine's, such as ``cpu`` or ``cuda:0``."""
    process = psutil.Process()
    cpu_s, rss_bytes = sum(process.cpu_times()[:4]), process.memory_info().rss
    return ProcessUsage(cpu_s=cpu_s, rss_bytes=rss_bytes, device=_device_usage(device))


def _device_usage(device: str) -> DeviceUsage | None:
    if not device.startswith("cuda"):
        return None
    import torch

    try:
        return DeviceUsage(
            utilisation=torch.cuda.utilization(device) / 100,
            memory_bytes=torch.cuda.device_memory_used(device),
            power_w=torch.cuda.power_draw(device) / 1000,
        )
    except Exception:  # torch needs the package nvidia-ml-py for it, and a driver that answers
        return None
