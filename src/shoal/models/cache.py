"""The user's cache folder for models, and building folders in it atomically, with file locks."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from shoal.models.progress import Progress

_PARTIAL = ".partial-"

OTHER_DISK_HINT = "set SHOAL_CACHE to a folder on another disk"


def cache_dir() -> Path:
    """Folder for models that Shoal pulled or converted.

    ``$SHOAL_CACHE`` if it is set, else ``shoal`` in the platform's cache folder for users
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


def build_once(
    target: Path,
    build: Callable[[Path], None],
    progress: Progress,
    usable: Callable[[Path], bool] = lambda folder: True,
) -> Path:
    """Return the folder ``target``; if it does not exist or is not ``usable``, let ``build`` fill it first.

    ``build`` gets an empty temporary folder, which takes the place of the target when ``build`` has returned.
    So an existing target is always complete. Under a file lock, which the operating system releases when its
    owner dies, one process builds while others wait. Leftovers of killed processes are removed.
    """
    _remove_leftovers(target.parent)
    if target.is_dir() and usable(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock_of(target.parent, target.name)
    _acquire(lock, f"waiting for another process that prepares {target.name}", progress)
    try:
        if target.is_dir() and usable(target):
            return target
        partial = _partial(target)
        partial.mkdir()
        try:
            build(partial)
            if target.is_dir():
                _remove(target)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        lock.release()
    return target


def remove_built(target: Path) -> None:
    """Remove what ``build_once`` has built, unless a process builds it now, or the cache is not writable."""
    with contextlib.suppress(OSError), _lock_of(target.parent, target.name).acquire(timeout=0):
        _remove(target)


def _remove(target: Path) -> None:
    """Remove a folder; at no time is a part of it at its path."""
    removed = _partial(target)
    target.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}{_PARTIAL}{uuid.uuid4().hex[:8]}")


def fingerprint(revision: int | str, source: Path, files: Iterable[Path]) -> str:
    """A cache key for what is made of ``files`` in ``source``; changes with a file or ``revision``."""
    stats = ((file.name, file.stat()) for file in files)
    identity = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps([revision, str(source), identity]).encode()).hexdigest()[:16]


def _lock_of(folder: Path, name: str) -> FileLock:
    return FileLock(folder / f".{name}.lock")


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f".*{_PARTIAL}*"):
        name = leftover.name[1:].rpartition(_PARTIAL)[0]
        # A locked folder is being built; a cache that is not writable is left alone.
        with contextlib.suppress(OSError), _lock_of(folder, name).acquire(timeout=0):
            shutil.rmtree(leftover, ignore_errors=True)


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
