"""Detecting a full disk in errors of pip, huggingface_hub and conversions, and one error for it."""

import errno
import shutil
from pathlib import Path

from shoal.core import ModelUnavailable

_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")


def is_disk_full(problem: BaseException | str) -> bool:
    """Whether an error, its cause, or a program's output says that a disk is full."""
    if isinstance(problem, str):
        return any(words in problem for words in _WORDS)
    if getattr(problem, "errno", None) in _ERRNOS or is_disk_full(str(problem)):
        return True
    cause = problem.__cause__ or problem.__context__
    return cause is not None and is_disk_full(cause)


def disk_full(what: str, folder: Path, remedy: str) -> ModelUnavailable:
    """The error for a full disk at ``folder``; what: what failed; remedy: where to store instead."""
    place = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    free_mb = shutil.disk_usage(place).free / 1e6
    return ModelUnavailable(
        f"{what}: the disk is full ({free_mb:.0f} MB are left at {place}). Make room there, or {remedy}"
    )
