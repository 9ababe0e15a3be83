"""WeightImage: the weights of a loaded model in one file, and everything else of the model in another.

The folder of an image has ``weights.bin``, which is read into memory as it is; ``skeleton.pickle``, the model
without its weights; and ``image.json`` with sizes and checksums. A pickle can run any code, so an image is
opened only where nobody else can have written it.
"""

import errno
import json
import os
import stat
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from shoal.core import ConfigError, ModelUnavailable
from shoal.execute.weights.memory import WeightMemory
from shoal.execute.weights.skeleton import Skeleton, put_together
from shoal.models import FACTS_FILE

CHUNK_BYTES = 4 << 20
"""Weights are read and checked in pieces of this size."""

WEIGHTS_FILE, SKELETON_FILE = "weights.bin", "skeleton.pickle"


class ImageDamaged(Exception):
    """A file of an image is missing, or is not the one that was written."""


class ImageOutdated(Exception):
    """An image was made from other files of its model, or by other versions."""


class Place(Enum):
    """Where the weights of an image are."""

    ABSENT = "absent"
    COMING = "coming"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class ImageOrigin:
    """What an image is made of."""

    source: Path
    """Folder of the model."""
    revision: str
    """Another one if the image would be another."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class WeightImage:
    """An image, and the memory of this process for its weights."""

    folder: Path
    memory: WeightMemory
    checksums: tuple[int, ...]
    """CRC-32 of each chunk."""
    file: int
    """Descriptor of the weights, which can be read even after another process has replaced the image."""
    place: Place = Place.ABSENT

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return len(self.memory.view)

    @property
    def weights_file(self) -> Path:
        return self.folder / WEIGHTS_FILE


def write_image(skeleton: Skeleton, folder: Path, origin: ImageOrigin) -> None:
    """Write an image into an empty folder, for its owner only."""
    folder.chmod(0o700)
    checksums = _write_weights(skeleton, folder / WEIGHTS_FILE)
    _write(folder / SKELETON_FILE, skeleton.pickled)
    facts = {
        "source": str(origin.source),
        "revision": origin.revision,
        "num_bytes": skeleton.num_bytes,
        "chunk_bytes": CHUNK_BYTES,
        "crc32": checksums,
        "skeleton_crc32": zlib.crc32(skeleton.pickled),
    }
    _write(folder / FACTS_FILE, json.dumps(facts).encode())


def open_image(folder: Path, revision: str) -> tuple[Any, WeightImage]:
    """The model of an image, and the image; its weights are absent, so the model must not run yet.

    revision: of its origin. Raises ImageOutdated for another one, ImageDamaged, ModelUnavailable if another
    user can have written the image, ConfigError if the process has no addresses or descriptors for it.
    """
    _check_owner(folder)
    # All files are of one image, even if another process replaces it meanwhile.
    with _opened(folder, os.O_DIRECTORY) as directory:
        for name in (WEIGHTS_FILE, SKELETON_FILE, FACTS_FILE):
            _check_owner(folder / name, directory)
        num_bytes, checksums, skeleton_crc32 = _read_facts(folder / FACTS_FILE, directory, revision)
        pickled = _read(folder / SKELETON_FILE, directory)
        if zlib.crc32(pickled) != skeleton_crc32:
            raise ImageDamaged(f"{folder / SKELETON_FILE} has another checksum than when it was written")
        memory = WeightMemory(num_bytes)
        image = WeightImage(folder, memory, checksums, _open(folder / WEIGHTS_FILE, 0, directory))
    weakref.finalize(image, os.close, image.file).atexit = False  # it may be read then
    if (size := os.fstat(image.file).st_size) != num_bytes:
        raise ImageDamaged(f"{folder / WEIGHTS_FILE} has {size} bytes instead of {num_bytes}")
    return put_together(pickled, memory.view), image


def _open(path: Path, flags: int, directory: int | None) -> int:
    """A descriptor of ``path``, within the open ``directory`` if that is given."""
    try:
        return os.open(path if directory is None else path.name, os.O_RDONLY | flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ConfigError(f"{path}: {error.strerror}: allow more, as with `ulimit -n 1024`") from error
        raise ImageDamaged(f"{path}: {error.strerror}") from error


@contextmanager
def _opened(path: Path, flags: int, directory: int | None = None) -> Iterator[int]:
    """``_open`` for a block."""
    file = _open(path, flags, directory)
    try:
        yield file
    finally:
        os.close(file)


def _read(path: Path, directory: int) -> bytes:
    with _opened(path, 0, directory) as file, os.fdopen(file, "rb", closefd=False) as content:
        return content.read()


def _read_facts(path: Path, directory: int, revision: str) -> tuple[int, tuple[int, ...], int]:
    """Size of the weights, and the checksums of their chunks and of the skeleton."""
    try:
        facts = json.loads(_read(path, directory))
        found, num_bytes, chunk_bytes = facts["revision"], int(facts["num_bytes"]), int(facts["chunk_bytes"])
        checksums, skeleton_crc32 = tuple(facts["crc32"]), int(facts["skeleton_crc32"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageDamaged(f"{path}: {error}") from error
    if found != revision:
        raise ImageOutdated(f"{path} is of another revision")
    if chunk_bytes != CHUNK_BYTES or len(checksums) != -(-num_bytes // CHUNK_BYTES):
        raise ImageDamaged(f"{path} has another number of checksums than chunks")
    return num_bytes, checksums, skeleton_crc32


def read_weights(image: WeightImage, *, check: bool, pace: Callable[[int], None] = lambda _: None) -> None:
    """Read the weights of an image into its memory.

    check: whether to compare the checksums. pace: called after each chunk with the bytes read so far; what it
    raises ends the reading. Raises ValueError if the file is not the one that was written, and OSError.
    """
    path, file = image.weights_file, image.file
    if (size := os.fstat(file).st_size) != image.num_bytes:
        raise _damaged(path, f"has {size} bytes instead of {image.num_bytes}")
    for number, start in enumerate(range(0, image.num_bytes, CHUNK_BYTES)):
        chunk = image.memory.view[start : start + CHUNK_BYTES]
        _read_chunk(file, chunk, start, path)
        if check and zlib.crc32(chunk) != image.checksums[number]:
            raise _damaged(path, "has another checksum than when it was written")
        pace(start + len(chunk))


def _read_chunk(file: int, chunk: memoryview, start: int, path: Path) -> None:
    done = 0
    while done < len(chunk):
        count = os.preadv(file, [chunk[done:]], start + done)
        if count == 0:
            raise _damaged(path, f"ends at {start + done} bytes")
        done += count


def _damaged(path: Path, how: str) -> ValueError:
    return ValueError(f"{path} {how}; remove the folder {path.parent}, and the next start makes it again")


def _check_owner(path: Path, directory: int | None = None) -> None:
    """Raise ImageDamaged if ``path`` does not exist, ModelUnavailable if another user can write it.

    directory: descriptor of the folder it is in; None: it is found by its path.
    """
    try:
        name = path if directory is None else path.name
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        raise ImageDamaged(f"{path}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ModelUnavailable(
            f"{path} belongs to another user, or others may write it, so it is not loaded; remove it, or set"
            " SHOAL_CACHE to a folder of your own"
        )


def _write(path: Path, content: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(content)


def _write_weights(skeleton: Skeleton, path: Path) -> list[int]:
    """Write all extents at their offsets, with zeros between them; returns the checksums of chunks."""
    path.touch(0o600)
    with path.open("r+b") as file:
        file.truncate(skeleton.num_bytes)
        for extent in skeleton.extents:
            file.seek(extent.offset)
            file.write(extent.content)
        # The system may lose the content of a file that was renamed before it was written.
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return [zlib.crc32(chunk) for chunk in iter(lambda: file.read(CHUNK_BYTES), b"")]
