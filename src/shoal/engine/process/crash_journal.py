"""Crash journal: a memory-mapped file with the requests that an engine was computing when it died.

The owner creates the file and reads it after a crash; the engine writes it. There is a slot for each of two
plans in flight: a length, a checksum, and the ids as msgpack. The system keeps the pages of a mapped file
when a process is killed, so nothing needs to be flushed.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

_SLOTS = 2
_SLOT_BYTES = 1 << 18  # for thousands of requests; pages are taken only when they are written
_HEAD = struct.Struct("<II")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[str])


def create_journal(path: Path) -> None:
    """Create an empty journal, in place of an existing file."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        os.truncate(file.fileno(), _SLOTS * _SLOT_BYTES)


def read_journal(path: Path) -> tuple[str, ...]:
    """The ids of the requests in plans in flight; none where the journal is damaged or missing."""
    try:
        content = path.read_bytes()
    except OSError:
        return ()
    ids: list[str] = []
    for slot in range(_SLOTS):
        ids += _read_slot(content[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES])
    return tuple(dict.fromkeys(ids))


def _read_slot(slot: bytes) -> list[str]:
    if len(slot) < _HEAD.size:
        return []
    length, checksum = _HEAD.unpack_from(slot)
    payload = slot[_HEAD.size : _HEAD.size + length]
    if not length or len(payload) < length or zlib.crc32(payload) != checksum:
        return []
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError:
        return []


class Journal:
    """The engine's side of a journal."""

    def __init__(self, path: Path) -> None:
        """Open an existing journal; raises OSError if there is none."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SLOTS * _SLOT_BYTES)

    def begin(self, plan: int, ids: Sequence[str]) -> None:
        """Write the requests of a plan before it is computed; nothing if they do not fit into a slot."""
        self.end(plan)
        payload = _encoder.encode(ids)
        if len(payload) > _SLOT_BYTES - _HEAD.size:
            return
        start = plan % _SLOTS * _SLOT_BYTES
        body = start + _HEAD.size
        self._memory[body : body + len(payload)] = payload
        # Last: until then the slot counts as empty.
        _HEAD.pack_into(self._memory, start, len(payload), zlib.crc32(payload))

    def end(self, plan: int) -> None:
        """Clear the slot of a finished plan."""
        _HEAD.pack_into(self._memory, plan % _SLOTS * _SLOT_BYTES, 0, 0)

    def close(self) -> None:
        self._memory.close()
