"""Messages between an engine and its grammar processes, and limits of CPU time and memory."""

import socket

import msgspec

from shoal.core import Grammar

COMPILE_CPU_S = 1.0
"""CPU time limit for compiling a grammar and computing the first mask."""
MEMORY_BYTES = 512 << 20
"""Memory limit of a grammar beyond the tokenizer."""
LOWEST_PRIORITY = 19
"""Niceness of work that delays no request."""
FORK = b"f"
"""Asks a fork server for a process; sent with the descriptor of a connection to it."""


class Start(msgspec.Struct, array_like=True, frozen=True):
    """To the process, once: the grammar."""

    grammar: Grammar
    trial: bool
    """Only check that the grammar can be compiled, at the lowest priority, and exit."""


class Compiled(msgspec.Struct, array_like=True, frozen=True):
    """From the process, once: the result of compiling the grammar."""

    error: str | None
    """Why the grammar cannot be used; None if it can."""


class SequenceTokens(msgspec.Struct, array_like=True, frozen=True):
    """New output tokens of a sequence."""

    sequence: int
    tokens: list[int]
    """Output tokens that were not sent before; all output tokens for a sequence that is new to the
    process."""


class Step(msgspec.Struct, array_like=True, frozen=True):
    """To the process: compute the masks of these sequences."""

    rows: list[SequenceTokens]
    """The sequences, in the order of the masks in the reply."""
    left: list[int]
    cpu_s: float


class MaskReply(msgspec.Struct, array_like=True, frozen=True):
    """From the process: the reply to a ``Step``; the masks follow as a separate message.

    Masks are uint32 [rows, words]: bit b of word w says whether token 32 * w + b is allowed.
    """

    failures: dict[int, str]
    """Rows that have no mask, and why."""


def request_fork(channel: socket.socket, descriptor: int) -> None:
    """Ask the fork server at the other end for a process that serves the connection ``descriptor``."""
    socket.send_fds(channel, [FORK], [descriptor])
