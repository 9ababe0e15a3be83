"""Matches tool results in Ollama's messages with calls: by id, by tool name, or by order."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from shoal.serve.ollama.messages import Call, OllamaMessage


def call_id(message: int, at: int, call: Call) -> str:
    """The id of call ``at`` of a message, also if the client gave it none."""
    return call.id or f"call_{message}_{at}"


def match_results(messages: Sequence[OllamaMessage]) -> list[tuple[int, str | None]]:
    """Message numbers in the order of the prompt, each result with the id of the call that it answers.

    Successive results may be in any order. They are matched first by id, then by the name of a called tool,
    then in the order of the calls. A user message closes all calls before it. A result that matches no call
    gets an id of its own. Results are sorted by their calls, because many chat templates render neither ids
    nor names.
    """
    ordered: list[tuple[int, str | None]] = []
    calls = _OpenCalls()
    results: list[int] = []
    for number, message in enumerate(messages):
        if message.role == "tool":
            results.append(number)
            continue
        ordered += _match(messages, results, calls)
        ordered.append((number, None))
        results = []
        if message.role == "user":
            calls = _OpenCalls()
        for at, call in enumerate(message.tool_calls or ()):
            calls.add(call_id(number, at, call), call.function.name)
    return ordered + _match(messages, results, calls)


def _match(
    messages: Sequence[OllamaMessage], results: Sequence[int], calls: "_OpenCalls"
) -> list[tuple[int, str | None]]:
    """``results`` in the order of the calls that they answer, with their ids; closes these calls."""
    if not results:
        return []
    call_ids: dict[int, str] = {}

    def pair(find: Callable[[OllamaMessage], str | None]) -> None:
        for number in results:
            if number not in call_ids and (found := find(messages[number])) is not None:
                call_ids[number] = found
                calls.close(found)

    pair(lambda result: result.tool_call_id)
    pair(lambda result: result.tool and calls.first_of(result.tool))
    pair(lambda result: None if result.tool else calls.first())
    ordered = sorted(results, key=lambda number: calls.rank(call_ids.get(number)))
    return [(number, call_ids.get(number, f"call_{number}")) for number in ordered]


class _OpenCalls:
    """Calls without a result so far."""

    def __init__(self) -> None:
        # Ordered dicts, since a client may send thousands of calls and the first must be found quickly.
        self._tools: OrderedDict[str, str] = OrderedDict()
        self._by_tool: dict[str, OrderedDict[str, None]] = {}
        self._ranks: dict[str, int] = {}
        self._added = 0

    def add(self, id: str, tool: str) -> None:
        self.close(id)
        self._tools[id] = tool
        self._by_tool.setdefault(tool, OrderedDict())[id] = None
        self._ranks[id] = self._added
        self._added += 1

    def close(self, id: str) -> None:
        """Remove the call ``id``, if it is open."""
        tool = self._tools.pop(id, None)
        if tool is not None:
            del self._by_tool[tool][id]

    def first(self) -> str | None:
        return next(iter(self._tools), None)

    def first_of(self, tool: str) -> str | None:
        return next(iter(self._by_tool.get(tool, ())), None)

    def rank(self, id: str | None) -> int:
        """The position of a call, open or closed; the last one for anything else."""
        return self._added if id is None else self._ranks.get(id, self._added)
