"""Memory from the system: a C heap that stays warm between steps, and huge pages."""

import ctypes
import mmap

import torch

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next step; returns whether that could be set.

    By default glibc returns large blocks to the system at once, and a prefill step, which allocates and
    frees megabytes in every layer, spends much of its time on page faults. Other C libraries are not
    changed. The setting is for the whole process and permanent: the process stays as large as its largest
    step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))


def use_huge_pages(buffer: torch.Tensor) -> bool:
    """Ask the system for huge pages in a buffer in host memory; returns whether it agreed.

    Attention reads blocks from all over the pool, and with pages of 4 KiB spends up to a third of its time on
    finding them. What was touched already keeps its pages.
    """
    advice, page = getattr(mmap, "MADV_HUGEPAGE", None), mmap.PAGESIZE
    start = -(-buffer.data_ptr() // page) * page
    length = (buffer.data_ptr() + buffer.nbytes - start) // page * page
    if advice is None or buffer.device.type != "cpu" or length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    return bool(madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice) == 0)
