"""How long a device takes, for the parts of `benchmarks/gpu_check`. Importing it needs torch."""

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
    """Milliseconds that ``work`` takes on a device at the median, each time with a cold L2 cache.

    A GPU's own clock is read. The host's time does not count if it queues ``work`` while the cache is being
    cleared, which takes about a tenth of a millisecond.
    """
    if device == "cpu":
        return median(_host_ms(work) for _ in range(rounds))
    work()
    flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(rounds):
        flushed.zero_()
        start = _now()
        work()
        pairs.append((start, _now()))
    torch.cuda.synchronize(device)
    return median(float(start.elapsed_time(end)) for start, end in pairs)


def _now() -> torch.cuda.Event:
    """When the GPU comes to this point of its queue."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _host_ms(work: Work) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def wait(device: str) -> None:
    """Wait until a device has done what was asked of it."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def recorded(work: Work, device: str) -> Work:
    """``work`` as one CUDA graph, so that starting its kernels takes no time; itself on a CPU."""
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
    """Bytes read and written, in GB a second, of a large copy on the device."""
    size = 1 << 20 if tiny else min(_COPY_BYTES, free_bytes(device) // 4)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.fill_(1)
    return 2 * size / median_ms(lambda: target.copy_(source), device, 9) / 1e6


def free_bytes(device: str) -> int:
    """Bytes that can still be allocated on a GPU; on a CPU as much as a dry run may take."""
    if device == "cpu":
        return 1 << 28
    gc.collect()
    torch.cuda.empty_cache()  # what this process keeps of former cases
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class Traced:
    """What a GPU did while some steps were made."""

    kernels: int
    """How many kernels it ran."""
    idle: float
    """Share of the time from the first kernel to the end of the last in which none ran."""
    longest: str
    """The kernels that took most of the time together, with their shares."""


def traced(work: Work, device: str) -> Traced | None:
    """What the device does during ``work``; None where it tells nothing, as on a CPU."""
    activities = [ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA]
    with profile(activities=activities) as trace:
        work()
        wait(device)
    events = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
    return summary((event.name, event.time_range.start, event.time_range.end) for event in events)


def summary(kernels: Iterable[tuple[str, float, float]]) -> Traced | None:
    """Of kernels with their begins and ends."""
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
    return Traced(len(found), 1 - busy / (until - found[0][1]), _longest(took))


def _longest(took: Mapping[str, float]) -> str:
    most = sorted(took, key=lambda name: took[name], reverse=True)[:_SHOWN_KERNELS]
    whole = sum(took.values())
    return ", ".join(f"{name[:_NAME_WIDTH]} {took[name] / whole:.0%}" for name in most)
