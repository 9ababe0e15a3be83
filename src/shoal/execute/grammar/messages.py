"""What an engine and the processes of its grammars tell each other, and how much those may use up."""

import socket

import msgspec

from shoal.core import Grammar

COMPILE_CPU_S = 1.0
"""CPU time for compiling a grammar and for the first mask."""
MEMORY_BYTES = 512 << 20
"""Memory of a grammar beyond the tokenizer's."""
LOWEST_PRIORITY = 19
"""Niceness of what nobody has to wait for."""
FORK = b"f"
"""Asks for a process; sent with the descriptor of a connection to it."""


class Start(msgspec.Struct, array_like=True, frozen=True):
    """To the process, once: what it is for."""

    grammar: Grammar
    """The grammar."""
    trial: bool
    """Only try whether it can be used, at the lowest priority, and end."""


class Compiled(msgspec.Struct, array_like=True, frozen=True):
    """From the process, once: whether the grammar can be used."""

    error: str | None
    """Why not."""


class Told(msgspec.Struct, array_like=True, frozen=True):
    """One sequence of a step."""

    sequence: int
    """Its number."""
    tokens: list[int]
    """Output tokens that were not told before; of a sequence that is new here, all."""


class Step(msgspec.Struct, array_like=True, frozen=True):
    """To the process: which tokens may follow in these sequences?"""

    rows: list[Told]
    """The sequences, in the order in which their masks are wanted."""
    left: list[int]
    """Sequences to forget."""
    cpu_s: float
    """CPU time that the answer may take."""


class Masked(msgspec.Struct, array_like=True, frozen=True):
    """From the process: the answer; the masks follow as a message of their own.

    They are uint32 [rows, words]: bit b of word w says whether token 32 * w + b is allowed.
    """

    failures: dict[int, str]
    """Rows that have no mask, and why."""


def ask_for_fork(channel: socket.socket, descriptor: int) -> None:
    """From the other end: start a process that serves the connection ``descriptor``."""
    socket.send_fds(channel, [FORK], [descriptor])
