"""The private folder of a node: short path, accessible to this user only, locked by the node process."""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from shoal.core import ConfigError

SOCKET = "node"

# Socket paths are limited to 107 bytes on Linux and 103 on macOS.
_MAX_SOCKET_PATH_BYTES = 100
# Sockets of engines have numbers as names.
_LONGEST_SOCKET = "9" * 8
_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")


def folder_path(name: str) -> Path:
    """The folder of the node of this name, in XDG_RUNTIME_DIR or else in the folder for temporary files.

    Raises ConfigError for a name that no file can have, or if no place has a short path.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"cluster.name must be 1 to 40 letters, digits, '.', '_' or '-', got {name!r}")
    for parent in filter(None, (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")):
        path = Path(parent) / f"{_prefix()}{name}"
        if len(os.fsencode(path / _LONGEST_SOCKET)) <= _MAX_SOCKET_PATH_BYTES and os.access(
            parent, os.W_OK | os.X_OK
        ):
            return path
    raise ConfigError("no folder with a short path for the engines' sockets; set TMPDIR to one, such as /tmp")


def _prefix() -> str:
    return f"shoal-{os.getuid()}-"


def check_folder(path: Path) -> None:
    """Raise ConfigError if a folder exists that other users own or may open."""
    with suppress(FileNotFoundError):
        facts = path.lstat()
        private = stat.S_ISDIR(facts.st_mode) and not facts.st_mode & 0o077
        if facts.st_uid != os.getuid() or not private:
            raise ConfigError(f"{path} is in the way: it must be a folder that only this user can open")


class NodeFolder:
    """A folder locked by this process, until ``remove``.

    The lock ends with the process, however that ends. Abandoned folders of other nodes are removed.
    """

    def __init__(self, path: Path) -> None:
        """Create or take over the folder; raises BlockingIOError if another process has it, ConfigError."""
        self.path = path
        for other in path.parent.glob(f"{_prefix()}*"):
            if other != path:
                _remove_abandoned(other)
        self._lock = _take(path)
        for left in path.iterdir():
            left.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _take(path: Path) -> int:
    """Create and lock the folder; returns its descriptor."""
    while True:
        with suppress(FileExistsError):
            path.mkdir(0o700)
        check_folder(path)
        try:
            lock = _lock(path)
        except FileNotFoundError:
            continue
        if _is_at(lock, path):
            return lock
        os.close(lock)  # its owner has removed it meanwhile


def _lock(path: Path) -> int:
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove_abandoned(path: Path) -> None:
    with suppress(OSError, ConfigError):
        check_folder(path)
        lock = _lock(path)
        if _is_at(lock, path):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
