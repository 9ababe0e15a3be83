"""glibc malloc settings: keep freed memory between steps, return it when a model is removed."""

import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next step; returns whether that could be set.

    By default glibc returns large blocks to the system at once, and a prefill step, which allocates and
    frees megabytes in every layer, spends much of its time on page faults. Other C libraries are not
    changed. The setting applies to the whole process, which stays as large as its largest step until
    ``return_freed_memory``.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))


def collect_frozen() -> None:
    """Collect garbage among frozen objects, too (``gc.freeze``); takes some tenths of a second."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()


def return_freed_memory() -> None:
    """Return all free memory to the system, once; memory that is freed later is kept as before."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))  # for all arenas, regardless of the thresholds
