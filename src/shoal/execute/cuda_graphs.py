"""Capture and replay of GPU work as CUDA graphs."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch

_CAPTURES = threading.Lock()
"""Held during a capture, when the allocator's cache must not be emptied: another thread may load a model."""


def empty_cuda_cache() -> None:
    """Give memory that torch has freed back to the GPU, for other sizes and other programs."""
    with _CAPTURES:
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Work that was captured once and can be replayed."""

    replay: Callable[[], None]
    """Run the work on the present contents of the buffers that it reads."""
    output: torch.Tensor
    """The buffer with its result."""


class GraphCapturer(Protocol):
    """Captures work on a device; see ``CudaGraphCapturer``."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture the work of ``compute``, which is called more than once and must do the same each time.

        It must return a persistent buffer, and may not allocate it after the first call.
        """


class CudaGraphCapturer:
    """Captures CUDA graphs on the current device; they share memory, so no two of them may run
    concurrently."""

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._memory: Any = None
        self._stream: torch.cuda.Stream | None = None
        """One for all captures: each stream keeps memory of its own."""

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        """See GraphCapturer; raises what ``compute`` raises, or torch's error if the work cannot be
        captured."""
        if not self._graphs:  # the memory pool was freed with its last graph
            self._memory = torch.cuda.graph_pool_handle()
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        self._stream.wait_stream(stream)
        try:
            with torch.cuda.stream(self._stream):
                compute()  # kernels are compiled outside of the capture
                with _CAPTURES:
                    output = self._capture(graph, compute)
        finally:
            # After an error, too: work before it reads buffers that the next step changes.
            stream.wait_stream(self._stream)
        self._graphs.add(graph)
        return CapturedGraph(graph.replay, output)

    def _capture(self, graph: torch.cuda.CUDAGraph, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        # ``torch.cuda.graph`` would wait for all work and empty the allocator's cache before.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            output = compute()
            graph.capture_end()
        except Exception:
            self._end_failed(graph)
            raise
        return output

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture after an error; before torch 2.12 that leaves the allocator in the pool."""
        with suppress(Exception):
            graph.capture_end()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._memory)
