"""Messages between a server and a tokenizer process, and their framing.

A frame is a header (request number, message length) and a message in msgpack. A reply has the number of its
request; short requests may be answered before long ones.
"""

import struct
from typing import Any

import msgspec
from msgspec import Struct

HEADER = struct.Struct("<QI")
"""Request number, and length of the message in bytes."""
SHORT_BYTES = 16 * 2**10
"""Requests up to this size are answered immediately, before longer ones."""


class Load(Struct, tag=True, array_like=True, frozen=True):
    """The first request: load a tokenizer."""

    file: str
    digest: str
    """Expected digest of the file, which may have been replaced."""
    bos_token: str | None
    """Prepended to texts unless the tokenizer itself does so; None for nothing."""


class Loaded(Struct, tag=True, array_like=True, frozen=True):
    """The reply to ``Load``."""

    vocabulary: bytes
    """A pickled ``Vocabulary``."""


class Encode(Struct, tag=True, array_like=True, frozen=True):
    """Encode texts."""

    texts: list[str]
    add_special_tokens: bool
    """See ``Tokenizer.encode``."""
    most_tokens: int | None
    """Stop at a text that has more; None for no limit."""


class Encoded(Struct, tag=True, array_like=True, frozen=True):
    """The reply to ``Encode``."""

    tokens: list[list[int]]
    """Token ids of each text, up to one that is too long."""
    at_least: int | None = None
    """Lower bound on the tokens of the text that is too long; None if there is none."""


class Tokenize(Struct, tag=True, array_like=True, frozen=True):
    """Tokenize a text for a client, with the result as JSON."""

    text: str
    add_special_tokens: bool
    with_strings: bool
    """Also return the text of each token."""


class Tokenized(Struct, tag=True, array_like=True, frozen=True):
    """The reply to ``Tokenize``."""

    count: int
    tokens: bytes
    """JSON list of token ids."""
    strings: bytes | None
    """JSON list of token texts."""


class Decode(Struct, tag=True, array_like=True, frozen=True):
    """Decode tokens, including special tokens."""

    tokens: list[int]


class Decoded(Struct, tag=True, array_like=True, frozen=True):
    """The reply to ``Decode``."""

    text: str


class Failed(Struct, tag=True, array_like=True, frozen=True):
    """The reply to a request that failed."""

    reason: str


TokenizerRequest = Load | Encode | Tokenize | Decode
TokenizerReply = Loaded | Encoded | Tokenized | Decoded | Failed

encode = msgspec.msgpack.Encoder().encode
"""Encodes a message, without its header."""
decode_request = msgspec.msgpack.Decoder(TokenizerRequest).decode
"""Decodes a request."""
decode_reply: Any = msgspec.msgpack.Decoder(TokenizerReply).decode
"""Decodes a reply."""
