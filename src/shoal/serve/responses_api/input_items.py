"""Input items of /v1/responses, and their translation to chat messages."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from shoal.serve.openai.content_parts import MAX_PARTS, ResponseParts, TextPart, check_role, text_of
from shoal.serve.openai.messages import MAX_MESSAGES, EarlierFunction, add_result_names, call_to_template
from shoal.serve.strict_model import UNION_TAG, StrictModel

Status = Literal["in_progress", "completed", "incomplete"]
Text = Annotated[
    str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)], AfterValidator(text_of)
]


class Item(StrictModel):
    """Fields of all items."""

    id: str | None = None
    """Ignored."""
    status: Status | None = None
    """Ignored."""


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | ResponseParts, AfterValidator(check_role), AfterValidator(text_of)]
    phase: str | None = None
    """Ignored."""


class FunctionCallItem(Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """JSON text."""
    parsed_arguments: Any = None
    """Ignored: clients add it."""
    async_: None = None
    """Ignored: clients add it."""
    namespace: None = None
    """Not supported."""
    caller: None = None
    """Not supported."""


class FunctionOutputItem(Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningText(StrictModel):
    """A part of a reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(Item):
    """The reasoning of an earlier response."""

    type: Literal["reasoning"]
    summary: ReasoningTexts | None = None
    """Ignored."""
    content: ReasoningTexts | None = None
    encrypted_content: str | None = None
    """Ignored: it can only be read where it was written."""


def _type_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return f"{UNION_TAG}{'message' if kind is None else kind}"


InputItem = Annotated[
    Annotated[MessageItem, Tag(f"{UNION_TAG}message")]
    | Annotated[FunctionCallItem, Tag(f"{UNION_TAG}function_call")]
    | Annotated[FunctionOutputItem, Tag(f"{UNION_TAG}function_call_output")]
    | Annotated[ReasoningItem, Tag(f"{UNION_TAG}reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="unknown_item",
        custom_error_message="Type must be message, function_call, function_call_output or reasoning",
    ),
]


def to_messages(sent: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages for the chat template."""
    if isinstance(sent, str):
        return [{"role": "user", "content": sent}]
    messages: list[dict[str, Any]] = []
    for item in sent:
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                last = messages[-1] if messages else {}
                if role == "assistant" and last.get("role") == role and last["content"] is None:
                    last["content"] = item.content  # its reasoning or calls came first
                else:
                    messages.append({"role": role, "content": item.content})
            case FunctionCallItem():
                function = EarlierFunction(name=item.name, arguments=item.arguments)
                _last_assistant_message(messages).setdefault("tool_calls", []).append(
                    call_to_template(item.call_id, function)
                )
            case FunctionOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            case ReasoningItem():
                text = "\n".join(part.text for part in item.content or ())
                messages.append({"role": "assistant", "content": None, "reasoning_content": text})
    add_result_names(messages)
    return messages


def _last_assistant_message(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, which is added if it is missing."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


InputItems = Annotated[
    list[InputItem],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]
