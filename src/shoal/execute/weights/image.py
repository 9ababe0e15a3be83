"""WeightImage: the weights of a loaded model in one file, and everything else of the model in another.

The folder of an image has ``weights.bin``, which is read into memory as it is; ``skeleton.pickle``, the model
without its weights; and ``image.json`` with sizes and checksums. A pickle can run any code, so an image is
opened only where nobody else can have written it.
"""

import json
import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from shoal.core import ModelUnavailable
from shoal.execute.weights.memory import WeightMemory
from shoal.execute.weights.skeleton import Skeleton, put_together

CHUNK_BYTES = 4 << 20
"""Weights are read and checked in pieces of this size."""

WEIGHTS_FILE, SKELETON_FILE, FACTS_FILE = "weights.bin", "skeleton.pickle", "image.json"


class ImageDamaged(Exception):
    """A file of an image is missing, or is not the one that was written."""


class Place(Enum):
    """Where the weights of an image are."""

    ABSENT = "absent"
    COMING = "coming"
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class WeightImage:
    """An image, and the memory of this process for its weights."""

    folder: Path
    memory: WeightMemory
    checksums: tuple[int, ...]
    """CRC-32 of each chunk."""
    place: Place = Place.ABSENT

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return len(self.memory.view)

    @property
    def weights_file(self) -> Path:
        return self.folder / WEIGHTS_FILE


def write_image(skeleton: Skeleton, folder: Path) -> None:
    """Write an image into an empty folder, for its owner only."""
    folder.chmod(0o700)
    checksums = _write_weights(skeleton, folder / WEIGHTS_FILE)
    _write(folder / SKELETON_FILE, skeleton.pickled)
    facts = {
        "num_bytes": skeleton.num_bytes,
        "chunk_bytes": CHUNK_BYTES,
        "crc32": checksums,
        "skeleton_crc32": zlib.crc32(skeleton.pickled),
    }
    _write(folder / FACTS_FILE, json.dumps(facts).encode())


def open_image(folder: Path) -> tuple[Any, WeightImage]:
    """The model of an image, and the image; its weights are absent, so the model must not run yet.

    Raises ImageDamaged, ModelUnavailable if another user can have written the image, ConfigError if the
    process has no addresses for it.
    """
    for path in (folder, *(folder / name for name in (WEIGHTS_FILE, SKELETON_FILE, FACTS_FILE))):
        _check_owner(path)
    try:
        facts = json.loads((folder / FACTS_FILE).read_bytes())
        num_bytes, chunk_bytes = int(facts["num_bytes"]), int(facts["chunk_bytes"])
        checksums, expected = tuple(facts["crc32"]), facts["skeleton_crc32"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageDamaged(f"{folder / FACTS_FILE}: {error}") from error
    if chunk_bytes != CHUNK_BYTES or len(checksums) != -(-num_bytes // CHUNK_BYTES):
        raise ImageDamaged(f"{folder / FACTS_FILE} has another number of checksums than chunks")
    if (size := (folder / WEIGHTS_FILE).stat().st_size) != num_bytes:
        raise ImageDamaged(f"{folder / WEIGHTS_FILE} has {size} bytes instead of {num_bytes}")
    pickled = (folder / SKELETON_FILE).read_bytes()
    if zlib.crc32(pickled) != expected:
        raise ImageDamaged(f"{folder / SKELETON_FILE} has another checksum than when it was written")
    memory = WeightMemory(num_bytes)
    return put_together(pickled, memory.view), WeightImage(folder, memory, checksums)


def read_weights(image: WeightImage, *, check: bool, pace: Callable[[int], None] = lambda _: None) -> None:
    """Read the weights of an image into its memory.

    check: whether to compare the checksums. pace: called after each chunk with the bytes read so far; what it
    raises ends the reading. Raises ValueError if the file is not the one that was written, and OSError.
    """
    path = image.weights_file
    file = os.open(path, os.O_RDONLY)
    try:
        if (size := os.fstat(file).st_size) != image.num_bytes:
            raise _damaged(path, f"has {size} bytes instead of {image.num_bytes}")
        for number, start in enumerate(range(0, image.num_bytes, CHUNK_BYTES)):
            chunk = image.memory.view[start : start + CHUNK_BYTES]
            _read_chunk(file, chunk, start, path)
            if check and zlib.crc32(chunk) != image.checksums[number]:
                raise _damaged(path, "has another checksum than when it was written")
            pace(start + len(chunk))
    finally:
        os.close(file)


def _read_chunk(file: int, chunk: memoryview, start: int, path: Path) -> None:
    done = 0
    while done < len(chunk):
        count = os.preadv(file, [chunk[done:]], start + done)
        if count == 0:
            raise _damaged(path, f"ends at {start + done} bytes")
        done += count


def _damaged(path: Path, how: str) -> ValueError:
    return ValueError(f"{path} {how}; remove the folder {path.parent}, and the next start makes it again")


def _check_owner(path: Path) -> None:
    """Raise ImageDamaged if ``path`` does not exist, ModelUnavailable if another user can write it."""
    try:
        found = path.lstat()
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
