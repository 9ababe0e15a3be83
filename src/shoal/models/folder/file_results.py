"""FileResults: what was computed from files, kept by their content; digests of files."""

import hashlib
import stat
import threading
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from shoal.core import ModelUnavailable

Result = TypeVar("Result")

_digests: dict[Hashable, str] = {}
"""By the identity of files, which links to one share."""


class FileResults(Generic[Result]):
    """Results by the content of the files that they were computed from.

    Many services on one model, or on models with the same tokenizer, have it read once. Results are never
    dropped, so they must be small.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Result] = {}
        self._computing = threading.Lock()

    def get(self, files: Iterable[Path], compute: Callable[[], Result], *further: Hashable) -> Result:
        """The result of ``compute`` for these files, and for ``further`` arguments, which are hashable.

        Errors are raised again by each call.
        """
        key = (*map(_content, files), *further)
        with self._computing:
            if key not in self._results:
                self._results[key] = compute()
            return self._results[key]


def digest_of(file: Path) -> str:
    """BLAKE2b of a file, read again if it has changed; raises ModelUnavailable if it cannot be read."""
    try:
        identity = _identity(file)
        if identity not in _digests:
            # Faster than SHA-256 where the processor does not help; a tokenizer may have 33 MB.
            with file.open("rb") as content:
                _digests[identity] = hashlib.file_digest(content, hashlib.blake2b).hexdigest()
        return _digests[identity]
    except OSError as error:
        raise ModelUnavailable(f"{file} cannot be read: {error}") from error


def _content(file: Path) -> Hashable:
    """A key for the content of a file; None: there is none."""
    try:
        # Reading a pipe would block.
        return digest_of(file) if stat.S_ISREG(file.stat().st_mode) else _identity(file)
    except ModelUnavailable:
        return _identity(file)
    except OSError:
        return None


def _identity(file: Path) -> Hashable:
    """Another after the file was changed or replaced; raises OSError."""
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
