"""The current CUDA device of a thread, on which Triton kernels and CUDA graphs run."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current CUDA device, which kernels outside of torch use; no effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
