"""The current CUDA device and stream of a thread, which Triton kernels and CUDA graphs use."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current CUDA device, which kernels outside of torch use; no effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Work inside does not wait for that of other threads on ``device``, nor they for it; it is done at the
    end. No effect for a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield
        torch.cuda.current_stream().synchronize()
