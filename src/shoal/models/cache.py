"""The user's cache folder, and building folders in it so that half-built ones never count."""

import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from shoal.models.progress import Progress


def cache_dir() -> Path:
    """Folder for models that Shoal pulled or converted.

    ``$SHOAL_CACHE`` where it is set, else ``shoal`` in the platform's cache folder for users
    (``$XDG_CACHE_HOME`` or ``~/.cache`` on Linux).
    """
    chosen = os.environ.get("SHOAL_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "shoal"
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


def build_once(target: Path, build: Callable[[Path], None], progress: Progress) -> Path:
    """Return the folder ``target``; where it does not exist, have ``build`` fill it first.

    ``build`` gets an empty folder beside the target, which takes the target's place only when
    ``build`` has returned. So an existing target is always complete. A file lock, which the
    operating system drops when its owner dies, lets one process build while others wait.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    _acquire(lock, f"waiting for another process that prepares {target.name}", progress)
    try:
        if target.is_dir():
            return target
        for leftover in target.parent.glob(f".{target.name}.partial-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        # A fresh name, because a killed process may have left a child that still writes.
        partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
        partial.mkdir()
        try:
            build(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        lock.release()
    return target


def _acquire(lock: FileLock, what: str, progress: Progress) -> None:
    while True:
        try:
            lock.acquire(timeout=1.0)
            return
        except Timeout:
            progress(what, 0, None)


def folder_bytes(folder: Path) -> int:
    """Size in bytes of all files below ``folder``."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
