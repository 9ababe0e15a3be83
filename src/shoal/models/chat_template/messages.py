"""Validating and normalising messages before a chat template renders them."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core import InvalidRequest

Message = Mapping[str, Any]
"""A message in the format of OpenAI's chat API, with arguments of tool calls as objects."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """``messages`` with their content as one text, and without keys whose value is None.

    A template that only checks whether a key exists would write None as text. Raises InvalidRequest if
    messages are malformed or empty.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role", param="messages")
    plain = _with_values(message)
    content, calls = plain.get("content"), plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if isinstance(content, list | tuple):
        plain["content"] = "".join(_part_text(part, where) for part in content)
    elif content is None:
        if not calls:
            plain["content"] = ""
    elif not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", param="messages")
    return plain


def _plain_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    plain = _with_values(call)
    if isinstance(function := plain.get("function"), Mapping):
        plain["function"] = _with_values(function)
    return plain


def _with_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _part_text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f'{where}.content has a part that is not {{"type": "text", "text": ...}};'
            " models here read text only",
            param="messages",
        )
    return text
