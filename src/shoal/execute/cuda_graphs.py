"""Recording of work on a GPU, as CUDA graphs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch


@dataclass(frozen=True, slots=True)
class Recorded:
    """Work that was recorded once and can be done again."""

    replay: Callable[[], None]
    """Do it again, with what then is in the buffers that it reads."""
    output: torch.Tensor
    """What it has made."""


class Recorder(Protocol):
    """Records work on a device."""

    def record(self, compute: Callable[[], torch.Tensor]) -> Recorded:
        """Record what ``compute`` does, which is called more than once and must do the same each time.

        What it returns has to be a buffer that stays, of which it allocates nothing after the first call.
        """


class CudaRecorder:
    """Records CUDA graphs on the current device, which share memory: no two of them may run side by side."""

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._memory: Any = None

    def record(self, compute: Callable[[], torch.Tensor]) -> Recorded:
        """See Recorder; raises what ``compute`` raises, or torch where it cannot be recorded."""
        if not self._graphs:  # with the last graph its memory went back, and the handle means nothing now
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            # As any other work first, so that kernels are compiled.
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                compute()
            stream.wait_stream(side)
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                output = compute()
        except Exception:
            # A capture that fails leaves its stream current, and the allocator (before torch 2.12) in it.
            torch.cuda.set_stream(stream)
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._memory)
            torch.cuda.synchronize()
            raise
        self._graphs.add(graph)
        return Recorded(graph.replay, output)
