"""Keeping the C heap warm between steps."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc keep what a step frees for the next one; returns whether it could be asked to.

    By default glibc hands large blocks back to the system at once, and a prefill step, which makes and
    frees megabytes in every layer, spends a good part of its time on the page faults of getting them
    again. Other C libraries are left as they are. Concerns the whole process, for good: it stays as
    large as its largest step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
