"""Sorts tool results in a history by their calls, because clients send them in order of completion."""

from collections.abc import Sequence

from shoal.models.chat_template.messages import Message


def sort_results(messages: Sequence[Message]) -> list[Message]:
    """``messages`` with the results after a message with calls in the order of these calls.

    Many chat templates show no ids, so that a model pairs results with calls by position. Results of other
    calls come last.
    """
    ordered: list[Message] = []
    results: list[Message] = []
    ranks: dict[str, int] = {}
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        ordered += _sorted(results, ranks)
        ordered.append(message)
        results = []
        ranks = {call["id"]: rank for rank, call in enumerate(message.get("tool_calls", ()))}
    return ordered + _sorted(results, ranks)


def _sorted(results: Sequence[Message], ranks: dict[str, int]) -> list[Message]:
    return sorted(results, key=lambda result: ranks.get(result.get("tool_call_id", ""), len(ranks)))
