"""Chat messages of request bodies, and their translation for chat templates."""

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from shoal.serve.openai.content_parts import Parts, check_role, text_of, thinking_of
from shoal.serve.openai.inert_fields import InertMessageFields
from shoal.serve.strict_model import StrictModel

MAX_MESSAGES = 4096
MAX_CALLS = 128


class EarlierFunction(StrictModel):
    """The function of a call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON text, or the object itself; null: there are none."""
    parsed_arguments: Any = None
    """Ignored: clients add it."""


class EarlierCall(StrictModel):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: EarlierFunction
    index: int | None = None
    """Ignored: its place in a stream."""


ToolCalls = Annotated[list[EarlierCall], Field(max_length=MAX_CALLS, fail_fast=True)]


def _only_for_roles(*roles: str) -> AfterValidator:
    """Only messages with these roles may have the field, unless it is empty."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role", roles[0]) not in roles:
            raise PydanticCustomError("wrong_role", f"Only messages with role {' or '.join(roles)} have it")
        return value

    return AfterValidator(check)


def _check_content(content: Any, info: ValidationInfo) -> Any:
    """Only assistant messages and tool results may have null content."""
    if content is None and info.data.get("role", "assistant") not in ("assistant", "tool"):
        raise PydanticCustomError("missing", "Field required")
    return content


def _check_call_id(call_id: str | None, info: ValidationInfo) -> str | None:
    if call_id is None and info.data.get("role") == "tool":
        raise PydanticCustomError("missing", "Field required")
    return call_id


class Message(InertMessageFields):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Parts | None,
        AfterValidator(check_role),
        AfterValidator(_check_content),
        Field(validate_default=True),
    ] = None
    """Parts are joined to one text, a line each. Only an assistant's and a tool's may be null, and only an
    assistant's have parts of type refusal and thinking; the latter are its reasoning."""
    tool_calls: Annotated[ToolCalls | None, _only_for_roles("assistant")] = None
    """Calls of tools that the assistant made."""
    tool_call_id: Annotated[
        str | None, _only_for_roles("tool"), AfterValidator(_check_call_id), Field(validate_default=True)
    ] = None
    """The call whose result a message with role tool is."""
    reasoning_content: Annotated[str | None, _only_for_roles("assistant")] = None
    """The assistant's reasoning, for chat templates that show it."""
    reasoning: Annotated[str | None, _only_for_roles("assistant")] = None
    """Another name of reasoning_content."""
    refusal: Annotated[str | None, _only_for_roles("assistant")] = None
    """What the assistant said instead of a content, as OpenAI's models return it."""
    parsed: Any = None
    """Ignored: clients add it."""

    def to_template(self) -> dict[str, Any]:
        """The message for the chat template: role "developer" becomes "system", arguments become objects."""
        role = "system" if self.role == "developer" else self.role
        calls = [call_to_template(call.id, call.function) for call in self.tool_calls or ()]
        content = self.refusal if self.content is None else text_of(self.content)
        content = content if calls else content or ""
        fields = {
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning or thinking_of(self.content),
            "name": self.name if self.role == "tool" else None,
        }
        return {"role": role, "content": content} | {name: value for name, value in fields.items() if value}


def call_to_template(id: str, function: EarlierFunction) -> dict[str, Any]:
    """A call for the chat template; arguments that are no JSON object stay text."""
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def messages_to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages for the chat template; tool results get the names of their functions."""
    # A worker process may send back thousands of messages: plain dicts are unpickled ten times as fast.
    plain = [message.to_template() for message in messages]
    add_result_names(plain)
    return plain


def add_result_names(messages: list[dict[str, Any]]) -> None:
    """Add the name of the called function to each tool result."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
