"""Properties of GPUs that decide how kernels are launched; fixed values elsewhere, for the interpreter."""

from functools import cache

import torch
from triton.runtime import driver

MULTIPROCESSORS_ELSEWHERE = 4
SHARED_BYTES_ELSEWHERE = 227 << 10
"""As of an H100."""


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors."""
    if device.type != "cuda":
        return MULTIPROCESSORS_ELSEWHERE
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one thread block may use."""
    if device.type != "cuda":
        return SHARED_BYTES_ELSEWHERE
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
