"""Timing, CUDA graphs and kernel traces on a device, for the parts of `benchmarks.gpu_check`; needs torch."""

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

_FLUSH_BYTES = 256 << 20
"""More than any card's L2 cache."""
_COPY_BYTES = 2 << 30
_SHOWN_KERNELS = 3
_NAME_WIDTH = 32

Work = Callable[[], object]


def median_ms(work: Work, device: str, rounds: int) -> float:
    """Median milliseconds of ``work`` on a device with a cold L2 cache.

    A GPU's own clock is read. Host time does not count if the host queues ``work`` while the cache is
    cleared, which takes about a tenth of a millisecond.
    """
    if device == "cpu":
        return median(_host_ms(work) for _ in range(rounds))
    work()
    flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(rounds):
        flushed.zero_()
        start = _record_event()
        work()
        pairs.append((start, _record_event()))
    torch.cuda.synchronize(device)
    return median(float(start.elapsed_time(end)) for start, end in pairs)


def _record_event() -> torch.cuda.Event:
    """An event at this point of the GPU's queue."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _host_ms(work: Work) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def wait(device: str) -> None:
    """Wait until the device is idle."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def recorded(work: Work, device: str) -> Work:
    """``work`` as one CUDA graph, to exclude kernel launches; unchanged on a CPU."""
    if device == "cpu":
        return work
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_gb_per_s(device: str, *, tiny: bool) -> float:
    """GB per second that a large copy on the device reads and writes."""
    size = 1 << 20 if tiny else min(_COPY_BYTES, free_bytes(device) // 4)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.fill_(1)
    return 2 * size / median_ms(lambda: target.copy_(source), device, 9) / 1e6


def free_bytes(device: str) -> int:
    """Free bytes of a GPU; on a CPU a limit for dry runs."""
    if device == "cpu":
        return 1 << 28
    gc.collect()
    torch.cuda.empty_cache()  # memory kept from earlier cases
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class KernelTrace:
    """Summary of the kernels that a GPU ran."""

    kernels: int
    """Number of launches."""
    idle: float
    """Share of the time from the first kernel to the last in which none ran."""
    longest: str
    """Kernels with the most time in all, with their shares."""


def traced(work: Work, device: str) -> KernelTrace | None:
    """Trace ``work``; None if the device reports no kernels, as on a CPU."""
    activities = [ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA]
    with profile(activities=activities) as trace:
        work()
        wait(device)
    events = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
    return summary((event.name, event.time_range.start, event.time_range.end) for event in events)


def summary(kernels: Iterable[tuple[str, float, float]]) -> KernelTrace | None:
    """kernels: (name, start, end)."""
    found = sorted(kernels, key=lambda kernel: kernel[1])
    if not found:
        return None
    took: dict[str, float] = {}
    busy = 0.0
    until = found[0][1]
    for name, start, end in found:
        took[name] = took.get(name, 0.0) + end - start
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return KernelTrace(len(found), 1 - busy / (until - found[0][1]), _longest(took))


def _longest(took: Mapping[str, float]) -> str:
    most = sorted(took, key=lambda name: took[name], reverse=True)[:_SHOWN_KERNELS]
    whole = sum(took.values())
    return ", ".join(f"{name[:_NAME_WIDTH]} {took[name] / whole:.0%}" for name in most)
