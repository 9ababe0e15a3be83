"""Tools, calls and results as plain text messages, for chat templates without tool support."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.models.chat_template.messages import Message

_HOW_TO_CALL = """\
You have tools. To call one, answer with nothing but the call, in this form:
<tool_call>
{"name": "the tool's name", "arguments": {"an argument": "its value"}}
</tool_call>
Make several calls one after the other. Arguments are a JSON object that fits the tool's schema. The results \
come back between <tool_response> and </tool_response>. If no tool helps, answer in words.

The tools are:
"""


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Instructions for the model on how to call ``tools``."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return _HOW_TO_CALL + "\n".join(lines)


def tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], takes_system: bool
) -> Sequence[Message]:
    """The conversation with tools, calls and results written into plain messages.

    takes_system: whether the template supports system messages; otherwise the first user message describes
    the tools. Successive results are joined in one user message.
    """
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        text = _text(message)
        if is_result and after_result:
            plain[-1]["content"] += f"\n{text}"
        else:
            kept = {key: value for key, value in message.items() if key not in _CALL_KEYS}
            plain.append(kept | {"role": "user" if is_result else message["role"], "content": text})
        after_result = is_result
    if not tools:
        return plain
    role = "system" if takes_system else "user"
    if plain and plain[0]["role"] == role:
        plain[0]["content"] = f"{plain[0]['content']}\n\n{describe_tools(tools)}".lstrip()
    else:
        plain.insert(0, {"role": role, "content": describe_tools(tools)})
    return plain


_CALL_KEYS = ("tool_calls", "tool_call_id", "name")


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    calls = (_call(call["function"]) for call in message.get("tool_calls", ()))
    return "\n".join(filter(None, (content, *calls)))


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
