"""Splits messages with parallel tool calls, for chat templates with one call per message (Llama 3)."""

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any

from shoal.core import InvalidRequest
from shoal.models.chat_template.messages import Message
from shoal.models.chat_template.template import ChatTemplate


def split_parallel_calls(template: ChatTemplate, messages: Sequence[Message]) -> Sequence[Message]:
    """``messages``, with one call in each if ``template`` refuses or drops parallel calls."""
    if all(len(message.get("tool_calls", ())) < 2 for message in messages):
        return messages
    special_tokens = tuple(sorted(template.special_tokens.items()))
    return messages if _supports_parallel_calls(template.source, special_tokens) else one_call_each(messages)


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with one message for each call, followed by the call's result."""
    split: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.get("tool_calls", ())) < 2:
            split.append(message)
            continue
        results = list(takewhile(lambda other: other["role"] == "tool", islice(messages, at, None)))
        at += len(results)
        split += _paired(message, results)
    return split


def _paired(message: Message, results: Sequence[Message]) -> list[Message]:
    """One message for each call, followed by its result; ``results`` without a call come last."""
    results_by_call: defaultdict[Any, deque[Message]] = defaultdict(deque)
    for result in results:
        results_by_call[result.get("tool_call_id")].append(result)
    paired: list[Message] = []
    for number, call in enumerate(message["tool_calls"]):
        # Content and reasoning stay with the first call.
        kept = {"role": message["role"]} if number else message
        paired.append({**kept, "tool_calls": [call]})
        if call_results := results_by_call[call["id"]]:
            paired.append(call_results.popleft())
    return paired + [result for call_results in results_by_call.values() for result in call_results]


@lru_cache(maxsize=64)
def _supports_parallel_calls(source: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether the template renders both of two calls in a message; also if it does not even render one."""
    template = ChatTemplate(source, dict(special_tokens))
    return _renders_all(template, ("first_function", "second_function")) or not _renders_all(
        template, ("only_function",)
    )


def _renders_all(template: ChatTemplate, names: Sequence[str]) -> bool:
    """Whether the template renders all calls of a message that calls these functions."""
    calls = [
        {"id": f"000call{number:02}", "type": "function", "function": {"name": name, "arguments": {"a": "b"}}}
        for number, name in enumerate(names)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "c"} for call in calls]
    question = {"role": "user", "content": "d"}
    try:
        text = template.render([question, {"role": "assistant", "tool_calls": calls}, *results])
    except InvalidRequest:
        return False
    return all(name in text for name in names)
