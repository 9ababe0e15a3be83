"""What an output is made of: content, reasoning and calls of tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the latest call, as JSON text."""

    text: str


Piece = Content | Reasoning | CallBegin | CallArguments


class OutputParser(Protocol):
    """Splits the text of one output into pieces, as it comes."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain after some more text."""

    def finish(self, cut: bool = False) -> list[Piece]:
        """What was held back, now that the output has ended; cut: but the model has not ended it."""

    @property
    def ends_in_call(self) -> bool:
        """Whether the output has ended within the arguments of a call."""


def join_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """``pieces`` with neighbours of one kind as one; beginnings of calls stay apart."""
    joined: list[Piece] = []
    for kind, group in groupby(pieces, type):
        if kind is CallBegin:
            joined += group
        else:
            joined.append(kind("".join(piece.text for piece in group if not isinstance(piece, CallBegin))))
    return joined
