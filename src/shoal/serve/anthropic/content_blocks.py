"""Messages of /v1/messages with their content blocks, and their translation to chat messages."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo
from pydantic.functional_validators import AfterValidator
from pydantic_core import PydanticCustomError

from shoal.serve.openai.chat_fields import Json
from shoal.serve.openai.content_parts import MAX_PARTS
from shoal.serve.openai.messages import EarlierFunction, add_result_names, call_to_template
from shoal.serve.strict_model import UNION_TAG, Ignored, StrictModel

_ASSISTANT_ONLY = ("tool_use", "thinking", "redacted_thinking")


class Block(StrictModel):
    """Fields of all blocks."""

    cache_control: Ignored | None = None
    """Ignored: prefixes are always cached."""


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=MAX_PARTS)] | None = None
    """Ignored."""


class ToolUseBlock(Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    """Its arguments."""
    caller: Ignored | None = None
    """Ignored: clients add it."""
    toolset_name: str | None = None
    """Ignored: clients add it."""


class ThinkingBlock(Block):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Ignored: it can only be checked where it was written."""


class RedactedThinkingBlock(Block):
    """Reasoning that can only be read where it was written."""

    type: Literal["redacted_thinking"]
    data: str
    """Ignored."""


class ToolResultBlock(Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """Text; null: nothing."""
    toolset_name: str | None = None
    """Ignored: clients add it."""
    is_error: bool | None = None
    """Whether the call failed. The text alone reaches the model, so let it say so."""


def _type_of(block: Any) -> str:
    return f"{UNION_TAG}{block.get('type') if isinstance(block, dict) else getattr(block, 'type', None)}"


InputBlock = Annotated[
    Annotated[TextBlock, Tag(f"{UNION_TAG}text")]
    | Annotated[ToolUseBlock, Tag(f"{UNION_TAG}tool_use")]
    | Annotated[ThinkingBlock, Tag(f"{UNION_TAG}thinking")]
    | Annotated[RedactedThinkingBlock, Tag(f"{UNION_TAG}redacted_thinking")]
    | Annotated[ToolResultBlock, Tag(f"{UNION_TAG}tool_result")],
    Discriminator(
        _type_of,
        custom_error_type="unknown_block",
        custom_error_message="Type must be text, tool_use, tool_result, thinking or redacted_thinking",
    ),
]
TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


def _check_role(content: Any, info: ValidationInfo) -> Any:
    """Raise if blocks do not fit the role of the message, which is validated before the content."""
    role = info.data.get("role")
    for block in () if isinstance(content, str) else content:
        if role != "assistant" and block.type in _ASSISTANT_ONLY:
            raise PydanticCustomError("wrong_role", "Only messages with role assistant have such blocks")
        if role != "user" and block.type == "tool_result":
            raise PydanticCustomError("wrong_role", "Only messages with role user have results of tools")
    return content


class InputMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | Annotated[list[InputBlock], Field(max_length=MAX_PARTS, fail_fast=True)],
        AfterValidator(_check_role),
    ]


def joined_text(content: str | Sequence[TextBlock] | None) -> str:
    """The text of a content, one line for each block."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def to_messages(sent: Sequence[InputMessage]) -> list[Json]:
    """The messages for the chat template."""
    messages: list[Json] = []
    for message in sent:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant_message(message.content))
        elif message.role == "system":
            text = joined_text([block for block in message.content if isinstance(block, TextBlock)])
            messages.append({"role": "system", "content": text})
        else:
            messages += _user_messages(message.content)
    add_result_names(messages)
    return messages


def _assistant_message(blocks: Sequence[InputBlock]) -> Json:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        call_to_template(block.id, EarlierFunction(name=block.name, arguments=block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: Json = {"role": "assistant", "content": joined_text(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(blocks: Sequence[InputBlock]) -> list[Json]:
    """Results of tools as messages of their own, and what the user says around them."""
    messages: list[Json] = []
    texts: list[TextBlock] = []

    def close_text() -> None:
        if texts:
            messages.append({"role": "user", "content": joined_text(texts)})
            texts.clear()

    for block in blocks:
        if isinstance(block, ToolResultBlock):
            close_text()
            result = joined_text(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        elif isinstance(block, TextBlock):
            texts.append(block)
    close_text()
    return messages or [{"role": "user", "content": ""}]
