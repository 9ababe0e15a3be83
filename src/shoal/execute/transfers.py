"""Copies between host and GPU that do not wait for the GPU's work."""

import weakref
from typing import Any, Protocol

import numpy as np
import torch

from shoal.core import ConfigError


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of ``array`` on the device, in the order of its work.

    torch keeps the pinned memory that it is copied from until the copy is done.
    """
    found = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return found.pin_memory().to(device, non_blocking=True)
    return found.clone()


def host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised uint8 [num_bytes] on the host; pinned if ``device`` is a GPU, so that copies overlap.

    torch's own pinned memory is rounded up to a power of two.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type == "cuda" and num_bytes:
        library = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = library.cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            size = f"{num_bytes / 2**30:.1f} GiB"
            raise ConfigError(f"kv_cache.swap: {size} of memory cannot be pinned ({error}); set it lower")
        weakref.finalize(memory, library.cudaHostUnregister, memory.data_ptr())
    return memory


class Reading(Protocol):
    """A copy from the device that is under way."""

    def wait(self) -> list[int]:
        """The numbers, once all work before the copy is done."""

    def duration_ns(self) -> int:
        """Time of the device between ``Queue.begin`` and the copy; valid after ``wait``."""


class Queue(Protocol):
    """Reads results of a device's work, which is done in order."""

    def begin(self) -> Any:
        """Mark the begin of a step's work."""

    def read(self, numbers: torch.Tensor, begun: Any) -> Reading:
        """Copy int64 ``numbers`` [n] to the host behind all work so far; begun: from ``begin``."""


class CudaQueue:
    """The current stream of the current CUDA device."""

    def begin(self) -> torch.cuda.Event:
        event = _timed_event()
        event.record()
        return event

    def read(self, numbers: torch.Tensor, begun: torch.cuda.Event) -> "CudaReading":
        return CudaReading(numbers, begun)


class CudaReading:
    def __init__(self, numbers: torch.Tensor, begun: torch.cuda.Event) -> None:
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._host.copy_(numbers, non_blocking=True)
        self._begun = begun
        self._done = _timed_event()
        self._done.record()

    def wait(self) -> list[int]:
        self._done.synchronize()
        found: list[int] = self._host.tolist()
        return found

    def duration_ns(self) -> int:
        return int(self._begun.elapsed_time(self._done) * 1e6)


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
