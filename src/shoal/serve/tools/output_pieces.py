"""Pieces of a parsed output: content, reasoning and tool calls; and the protocol of output parsers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The start of a tool call; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the latest call, as JSON text."""

    text: str


Piece = Content | Reasoning | CallBegin | CallArguments


class OutputParser(Protocol):
    """Splits the text of one output into pieces, incrementally."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain after ``text``; the rest is held back."""

    def finish(self, cut: bool = False) -> list[Piece]:
        """The pieces that were held back, at the end of the output. cut: a limit, not the model, ended it."""

    @property
    def ends_in_call(self) -> bool:
        """Whether the output ended within the arguments of a call."""


def join_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """``pieces`` with adjacent ones of a type joined, except the starts of calls."""
    joined: list[Piece] = []
    for kind, group in groupby(pieces, type):
        if kind is CallBegin:
            joined += group
        else:
            joined.append(kind("".join(piece.text for piece in group if not isinstance(piece, CallBegin))))
    return joined
