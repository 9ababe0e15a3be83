"""Keeping the C heap warm between steps."""

import ctypes

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
