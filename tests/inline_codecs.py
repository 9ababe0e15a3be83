"""Tokenizers that do in this process what those of a server do in another."""

from collections.abc import Sequence
from typing import Any

from shoal.models.tokenizer.encoding import encode_texts, tokenize
from shoal.models.tokenizer.messages import Encoded, Tokenized


class InlineCodec:
    """What a server asks of a tokenizer, for classes that encode and decode."""

    closed = 0

    async def ready(self) -> None:
        """It always is."""

    async def encode_texts(
        self: Any, texts: Sequence[str], add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> Encoded:
        return encode_texts(self, texts, add_special_tokens, most_tokens)

    async def tokenize(self: Any, text: str, add_special_tokens: bool, with_strings: bool) -> Tokenized:
        return tokenize(self, text, add_special_tokens, with_strings)

    async def detokenize(self: Any, tokens: Sequence[int]) -> str:
        text: str = self.decode(tokens, skip_special_tokens=False)
        return text

    def close(self) -> None:
        self.closed += 1


class Inlined(InlineCodec):
    """Any tokenizer, as a server takes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
