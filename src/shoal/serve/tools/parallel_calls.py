"""Histories for chat templates that lay out one call in a message, as Llama 3's does."""

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any

from shoal.core import InvalidRequest
from shoal.models.chat_template.messages import Message
from shoal.models.chat_template.template import ChatTemplate


def split_parallel_calls(template: ChatTemplate, messages: Sequence[Message]) -> Sequence[Message]:
    """``messages``, with one call in each where ``template`` refuses several, or would leave some out."""
    if all(len(message.get("tool_calls", ())) < 2 for message in messages):
        return messages
    special_tokens = tuple(sorted(template.special_tokens.items()))
    return messages if _takes_several(template.source, special_tokens) else one_call_each(messages)


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with a message for each call, which the call's result follows."""
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
    """The calls of ``message``, each before its result; ``results`` of no call come last."""
    waiting: defaultdict[Any, deque[Message]] = defaultdict(deque)
    for result in results:
        waiting[result.get("tool_call_id")].append(result)
    paired: list[Message] = []
    for number, call in enumerate(message["tool_calls"]):
        # Content and reasoning came before the first.
        kept = {"role": message["role"]} if number else message
        paired.append({**kept, "tool_calls": [call]})
        if own := waiting[call["id"]]:
            paired.append(own.popleft())
    return paired + [result for own in waiting.values() for result in own]


@lru_cache(maxsize=64)
def _takes_several(source: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether the template shows both of two calls in a message; also where it does not even show one."""
    template = ChatTemplate(source, dict(special_tokens))
    return _shows(template, ("first_function", "second_function")) or not _shows(template, ("only_function",))


def _shows(template: ChatTemplate, names: Sequence[str]) -> bool:
    """Whether a message with calls of these functions has them all in the prompt."""
    calls = [
        {"id": f"000call{number:02}", "type": "function", "function": {"name": name, "arguments": {"a": "b"}}}
        for number, name in enumerate(names)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "c"} for call in calls]
    asked = {"role": "user", "content": "d"}
    try:
        text = template.render([asked, {"role": "assistant", "tool_calls": calls}, *results])
    except InvalidRequest:
        return False
    return all(name in text for name in names)
