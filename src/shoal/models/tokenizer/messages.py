"""What a server and the process of a tokenizer tell each other, and how that is framed.

A frame is a header, with the number of the question and the length of what follows, and a message as msgpack.
An answer has the number of its question; short questions may be answered before long ones.
"""

import struct
from typing import Any

import msgspec
from msgspec import Struct

HEADER = struct.Struct("<QI")
"""Number of the question, and length of the message in bytes."""
SHORT_BYTES = 16 * 2**10
"""Questions up to this size are answered at once, between the others."""


class Load(Struct, tag=True, array_like=True, frozen=True):
    """The first question: read a tokenizer."""

    file: str
    """Its tokenizer.json."""
    digest: str
    """Of that file, which may have been replaced since."""
    bos_token: str | None
    """Begins texts, unless the tokenizer itself puts it there; None: nothing."""


class Loaded(Struct, tag=True, array_like=True, frozen=True):
    """It was read."""

    vocabulary: bytes
    """A pickled ``Vocabulary``."""


class Encode(Struct, tag=True, array_like=True, frozen=True):
    """Which tokens are these texts?"""

    texts: list[str]
    add_special_tokens: bool
    """Begin (or end) as the model was trained to."""
    most_tokens: int | None
    """Give up at a text that surely has more; None: never."""


class Encoded(Struct, tag=True, array_like=True, frozen=True):
    """The tokens of texts."""

    tokens: list[list[int]]
    """Of each text, up to one that is too long."""
    at_least: int | None = None
    """A lower bound of the tokens of the next text, if these are more than ``most_tokens``."""


class Tokenize(Struct, tag=True, array_like=True, frozen=True):
    """Which tokens is this text? As JSON, for somebody else."""

    text: str
    add_special_tokens: bool
    with_strings: bool
    """Tell the text of each token, too."""


class Tokenized(Struct, tag=True, array_like=True, frozen=True):
    """The tokens of a text, as JSON."""

    count: int
    """How many."""
    tokens: bytes
    """A list of their ids."""
    strings: bytes | None
    """A list of their texts."""


class Decode(Struct, tag=True, array_like=True, frozen=True):
    """Which text are these tokens, special ones included?"""

    tokens: list[int]


class Decoded(Struct, tag=True, array_like=True, frozen=True):
    """The text of tokens."""

    text: str


class Failed(Struct, tag=True, array_like=True, frozen=True):
    """A question has no answer."""

    reason: str
    """Why."""


Question = Load | Encode | Tokenize | Decode
Answer = Loaded | Encoded | Tokenized | Decoded | Failed

encode = msgspec.msgpack.Encoder().encode
"""A message without its header."""
decode_question = msgspec.msgpack.Decoder(Question).decode
"""A question from its message."""
decode_answer: Any = msgspec.msgpack.Decoder(Answer).decode
"""An answer from its message."""
