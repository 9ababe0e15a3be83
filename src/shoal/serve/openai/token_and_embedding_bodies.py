"""Request bodies of the endpoints that generate no text: /tokenize, /detokenize and /v1/embeddings."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, cast

from pydantic import AfterValidator, Field

from shoal.core import InvalidRequest
from shoal.serve.openai.chat_fields import Json, TemplateFields, Tools
from shoal.serve.openai.extra_fields import Priority, Salt, TokenId, Truncation
from shoal.serve.openai.messages import MAX_MESSAGES, Message, messages_to_template
from shoal.serve.openai.request_bodies import ServiceBody
from shoal.serve.strict_model import NotFalse, NotTrue

MAX_INPUTS = 2048

Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class TokenizeBody(TemplateFields, ServiceBody):
    """What to tokenise: either a text or a chat."""

    prompt: str | None = None
    """A text."""
    messages: (
        Annotated[
            list[Message],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            AfterValidator(messages_to_template),
        ]
        | None
    ) = None
    """A chat, which the model's template lays out."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens. Default true for a text, and false for a chat, whose template
    has them."""
    return_token_strs: bool | None = None
    """Also return the text of each token."""
    tools: Tools | None = None
    """Of a chat: functions that the model may call."""

    def conversation(self) -> list[Json] | None:
        """The messages for the chat template; None for a text.

        Raises InvalidRequest if both or neither are given, or the last message cannot be continued.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        messages = cast("list[Json] | None", self.messages)
        if messages is not None:
            self.check_last_message(messages)
        return messages


class DetokenizeBody(ServiceBody):
    """Of which tokens to make text."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    """Token ids."""


class EmbeddingBody(ServiceBody):
    """What to embed."""

    field_errors: ClassVar[Mapping[str, str]] = {
        "input": "must be a string, a list of strings, a list of token ids, or a list of lists of token ids; "
        f"lists must not be empty and have at most {MAX_INPUTS} inputs, token ids are integers from 0 on",
    }

    input: str | Texts | Ids | IdLists
    """One text or several, also as token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or base64 of float32 in little-endian order. Default float."""
    dimensions: None = None
    """Not supported: the first numbers of an embedding mean something only in models trained for that."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens to a text. Default true."""
    truncate_prompt_tokens: Truncation | None = None
    """Keep only this many last tokens of an input; -1: as many as the model takes."""
    priority: Priority | None = None
    """Lower ones come first. Other than 0 only where scheduler.order is priority."""
    cache_salt: Salt | None = None
    """The KV of inputs is shared only with requests that have the same salt."""
    output_dimension: None = None
    """Not supported: the first numbers of an embedding mean something only in models trained for that."""
    output_dtype: Literal["float"] | None = None
    """Not supported: encoding_format is float or base64."""
    embed_dtype: Literal["float32"] | None = None
    """Not supported: vectors are of float32."""
    endianness: Literal["native", "little"] | None = None
    """Not supported: base64 is of numbers in little-endian order."""
    normalize: NotFalse | None = None
    """Not supported, must be true: vectors have length 1."""
    late_chunking: NotTrue | None = None
    """Not supported: each input has a vector of its own."""
    user: str | None = None
    """Ignored."""
    request_id: str | None = None
    """Ignored: a response has an id of its own."""

    def inputs(self) -> list[str] | list[list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        # Validation has checked that all entries of a list have one type.
        return cast(
            "list[str] | list[list[int]]", [self.input] if isinstance(self.input[0], int) else self.input
        )
