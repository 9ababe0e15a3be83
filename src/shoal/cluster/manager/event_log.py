"""The event log: events and decisions of a manager as JSON lines, and their replay."""

from collections.abc import Iterable
from typing import IO

import msgspec

from shoal.cluster.manager.actions import ClusterAction
from shoal.cluster.manager.dispatch import dispatch_named
from shoal.cluster.manager.events import ClusterEvent
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions

VERSION = 1

Entry = tuple[int, ClusterEvent, list[ClusterAction]]
"""(time in ns, event, actions)."""


class _Head(msgspec.Struct, frozen=True):
    version: int
    options: ClusterOptions


class ReplayDiffers(Exception):
    """The replay of a log gave another decision."""


class EventLogWriter:
    """Writes a log as JSON lines to a binary file, which stays open."""

    def __init__(self, file: IO[bytes], options: ClusterOptions) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._write(_Head(VERSION, options))

    def write(self, now_ns: int, event: ClusterEvent, actions: list[ClusterAction]) -> None:
        self._write((now_ns, event, actions))

    def _write(self, line: object) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")


def read_log(lines: Iterable[bytes]) -> tuple[ClusterOptions, list[Entry]]:
    """The manager's options and all entries; raises ValueError for other files.

    An incomplete last line, as of a killed process, is ignored.
    """
    rest = list(lines)
    if not rest:
        raise ValueError("the log is empty")
    head = msgspec.json.decode(rest.pop(0), type=_Head)
    if head.version != VERSION:
        raise ValueError(f"a log of version {head.version}, but only {VERSION} is known")
    if rest and not rest[-1].endswith(b"\n"):
        del rest[-1]
    decoder = msgspec.json.Decoder(Entry)
    return head.options, [decoder.decode(line) for line in rest]


def replay(lines: Iterable[bytes]) -> None:
    """Replay a log with a new manager; raises ReplayDiffers at the first different decision."""
    options, entries = read_log(lines)
    manager = Manager(options, dispatch_named(options.dispatch))
    for number, (now_ns, event, actions) in enumerate(entries):
        decided, written = (msgspec.json.encode(each) for each in (manager.handle(event, now_ns), actions))
        if decided != written:
            raise ReplayDiffers(
                f"event {number + 1}, {event}: {decided.decode()} instead of {written.decode()}"
            )
