"""Content parts of messages: text, refusals, and reasoning of earlier turns."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo
from pydantic_core import PydanticCustomError

from shoal.serve.strict_model import UNION_TAG, StrictModel

MAX_PARTS = 1024
IgnoredList = Annotated[list[Any], Field(max_length=MAX_PARTS)]


class TextPart(StrictModel):
    """Text of the client, or of an earlier answer."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: IgnoredList | None = None
    """Ignored."""
    logprobs: IgnoredList | None = None
    """Ignored."""
    parsed: Any = None
    """Ignored: clients add it."""


class RefusalPart(StrictModel):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class ThinkingPart(StrictModel):
    """An assistant's reasoning of an earlier turn, as Anthropic's clients and Mistral's send it."""

    type: Literal["thinking"]
    thinking: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
    signature: str | None = None
    """Ignored: it can only be checked where it was written."""
    closed: bool | None = None
    """Ignored."""


def _tag_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return UNION_TAG + (kind if kind in ("refusal", "thinking") else "text")


Text = Annotated[TextPart, Tag(f"{UNION_TAG}text")]
Refusal = Annotated[RefusalPart, Tag(f"{UNION_TAG}refusal")]
Thinking = Annotated[ThinkingPart, Tag(f"{UNION_TAG}thinking")]
Parts = Annotated[
    list[Annotated[Text | Refusal | Thinking, Discriminator(_tag_of)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]
"""Content parts of chats."""
ResponseParts = Annotated[
    list[Annotated[Text | Refusal, Discriminator(_tag_of)]], Field(max_length=MAX_PARTS, fail_fast=True)
]
"""Content parts of /v1/responses, where reasoning is an item of its own."""
Content = str | Sequence[TextPart | RefusalPart | ThinkingPart] | None


def check_role(content: Content, info: ValidationInfo) -> Content:
    """Raise if the parts do not fit the role of the message, which is validated before the content."""
    of_assistant = any(not isinstance(part, TextPart) for part in _parts(content))
    if of_assistant and info.data.get("role", "assistant") != "assistant":
        raise PydanticCustomError("wrong_role", "Only messages with role assistant have such parts")
    return content


def text_of(content: Content) -> str | None:
    """The text of a content, one line for each part; None: there is no content."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(_part_texts(content))


def thinking_of(content: Content) -> str | None:
    """The reasoning in a content, one line for each part; None: it has none."""
    thoughts = [part.thinking for part in _parts(content) if isinstance(part, ThinkingPart)]
    return "\n".join(text_of(thought) or "" for thought in thoughts) if thoughts else None


def _parts(content: Content) -> Sequence[TextPart | RefusalPart | ThinkingPart]:
    return () if content is None or isinstance(content, str) else content


def _part_texts(parts: Sequence[TextPart | RefusalPart | ThinkingPart]) -> Iterator[str]:
    for part in parts:
        match part:
            case TextPart():
                yield part.text
            case RefusalPart():
                yield part.refusal
