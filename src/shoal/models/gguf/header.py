"""Quantisation of a GGUF file from its header, skipping arrays such as the vocabulary."""

import struct
from pathlib import Path
from typing import BinaryIO

# struct's letters by the type numbers of GGUF metadata (ggml's gguf.md).
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEY = b"general.file_type"
# A file with more keys is damaged.
_MAX_KEYS = 4096


def gguf_quantisation(file: Path) -> str | None:
    """Type of most weights in ``file``, such as ``Q4_K_M`` or ``F16``; None if unknown."""
    try:
        with file.open("rb") as opened:
            number = _file_type(opened)
    except (OSError, struct.error, ValueError, OverflowError, RecursionError):  # damaged
        return None
    if number is None:
        return None
    from gguf import LlamaFileType

    names = {kind.value: kind.name for kind in LlamaFileType}
    name = names.get(number)
    return None if name is None else name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _file_type(file: BinaryIO) -> int | None:
    """The value of ``general.file_type``, which precedes the vocabulary; None if it is absent."""
    magic, _, _, keys = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF":
        raise ValueError("no GGUF file")
    for _ in range(min(keys, _MAX_KEYS)):
        length = _number(file, "Q")
        key = file.read(length) if length == len(_KEY) else file.seek(length, 1)
        kind = _number(file, "I")
        if key == _KEY and kind in _SCALARS:
            return _number(file, _SCALARS[kind])
        _skip(file, kind)
    return None


def _number(file: BinaryIO, letter: str) -> int:
    (value,) = struct.unpack(f"<{letter}", file.read(struct.calcsize(f"<{letter}")))
    return int(value)


def _skip(file: BinaryIO, kind: int) -> None:
    """Skip a value; raises ValueError for an unknown type."""
    if kind in _SCALARS:
        file.seek(struct.calcsize(f"<{_SCALARS[kind]}"), 1)
    elif kind == _STRING:
        file.seek(_number(file, "Q"), 1)
    elif kind == _ARRAY:
        inner, count = _number(file, "I"), _number(file, "Q")
        if inner in _SCALARS:
            file.seek(count * struct.calcsize(f"<{_SCALARS[inner]}"), 1)
            return
        for _ in range(count):
            _skip(file, inner)
    else:
        raise ValueError(f"no kind of value: {kind}")
