"""The bytes of a token, from a vocabulary's alphabet; and how normalizers change the length of texts.

Byte-level BPE (Radford et al., GPT-2, 2019) writes every byte as one printable character.
SentencePiece-style vocabularies (Kudo and Richardson, 2018) write ``▁`` for a blank, and bytes that no piece
covers as ``<0xE2>``.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from math import prod
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenAlphabet(Enum):
    """How a vocabulary writes bytes."""

    BYTE_LEVEL = "byte-level"
    PIECES = "pieces"
    PLAIN = "plain"


def alphabet_of(decoder: Mapping[str, Any] | None) -> TokenAlphabet:
    """The alphabet, from the ``decoder`` entry of a tokenizer.json."""
    kinds = set(_kinds(decoder or {}))
    if "ByteLevel" in kinds:
        return TokenAlphabet.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return TokenAlphabet.PIECES
    return TokenAlphabet.PLAIN


def never_shortens(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether the ``normalizer`` entry of a tokenizer.json never makes a text shorter."""
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    return all(step.get("type") == "Prepend" or _only_lengthens(step) for step in steps)


def max_growth(normalizer: Mapping[str, Any] | None) -> float:
    """The largest factor by which the ``normalizer`` entry of a tokenizer.json lengthens a text."""
    step = normalizer or {}
    if step.get("type") == "Sequence":
        return prod(max_growth(inner) for inner in step.get("normalizers", []))
    if step.get("type") == "Prepend":
        return 1 + len(step.get("prepend", ""))
    if step.get("type") == "Replace":
        return max(1, len(step.get("content", "")) / max(1, len(step["pattern"].get("String", ""))))
    return 1


def _only_lengthens(step: Mapping[str, Any]) -> bool:
    pattern = step.get("pattern", {}).get("String")
    return step.get("type") == "Replace" and bool(pattern) and len(step.get("content", "")) >= len(pattern)


def _kinds(decoder: Mapping[str, Any]) -> list[str]:
    inner = decoder.get("decoders", [])
    return [decoder.get("type", ""), *(kind for part in inner for kind in _kinds(part))]


def _byte_level_alphabet() -> dict[str, int]:
    # Printable Latin-1 bytes are themselves; the others are the characters from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level(piece: str) -> bytes:
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return piece.encode()  # an added token, which is plain text


def _pieces(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


BYTES_OF_PIECE: Mapping[TokenAlphabet, Callable[[str], bytes]] = {
    TokenAlphabet.BYTE_LEVEL: _byte_level,
    TokenAlphabet.PIECES: _pieces,
    TokenAlphabet.PLAIN: str.encode,
}
