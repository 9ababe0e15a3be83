"""A log of what a manager was told and decided, and the proof that it decides the same again."""

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
"""When a manager was told of an event, the event, and what it decided."""


class _Head(msgspec.Struct, frozen=True):
    """The first line."""

    version: int
    options: ClusterOptions


class ReplayDiffers(Exception):
    """A manager decides otherwise than one did before."""


class EventLogWriter:
    """Writes a log as JSON lines; file: where to, opened for bytes, which stays open."""

    def __init__(self, file: IO[bytes], options: ClusterOptions) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._write(_Head(VERSION, options))

    def write(self, now_ns: int, event: ClusterEvent, actions: list[ClusterAction]) -> None:
        """Add an event and what followed from it."""
        self._write((now_ns, event, actions))

    def _write(self, line: object) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")


def read_log(lines: Iterable[bytes]) -> tuple[ClusterOptions, list[Entry]]:
    """The options of the manager, and all entries. Raises ValueError for what is no log.

    A last line that was cut off, because the process was killed, is left out.
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
    """Tell a new manager everything in a log; raises ReplayDiffers at the first other decision."""
    options, entries = read_log(lines)
    manager = Manager(options, dispatch_named(options.dispatch))
    for number, (now_ns, event, actions) in enumerate(entries):
        decided, written = (msgspec.json.encode(each) for each in (manager.handle(event, now_ns), actions))
        if decided != written:
            raise ReplayDiffers(
                f"event {number + 1}, {event}: {decided.decode()} instead of {written.decode()}"
            )
