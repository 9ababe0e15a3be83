"""Folders for sockets: with short paths, open only to this user, and removed in the end."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from shoal.core import ConfigError

_PREFIX = "shoal-socket-"
# Socket paths are limited to 107 bytes on Linux and 103 on macOS.
_MAX_SOCKET_PATH_BYTES = 100
# The process that made a younger folder may not have locked it yet.
_MIN_AGE_S = 60.0


class PrivateFolder:
    """A new folder, until ``remove``.

    Its owner holds a lock on it, which the system releases however the owner ends; folders left behind by
    processes that were killed are removed here.
    """

    def __init__(self, socket_name: str) -> None:
        """Make the folder; raises ConfigError if no place is short enough for ``socket_name`` in it."""
        base = _base(socket_name)
        _remove_abandoned(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock: int | None = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder; removing twice does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _base(socket_name: str) -> Path:
    """The folder for temporary files, or another place with a short path."""
    places = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp"]
    for place in filter(None, places):
        path = Path(place) / f"{_PREFIX}{'x' * 8}" / socket_name
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES and os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    raise ConfigError("no folder with a short path for the engine's socket; set TMPDIR to one, such as /tmp")


def _remove_abandoned(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            facts = folder.stat(follow_symlinks=False)
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < _MIN_AGE_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EWOULDBLOCK, errno.EACCES, errno.ENOTDIR, errno.ELOOP):
                raise
