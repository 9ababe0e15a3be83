"""Which call of a tool a result answers: Ollama's messages say it by an id, by a name, or not at all."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol


class _Function(Protocol):
    @property
    def name(self) -> str: ...


class _Call(Protocol):
    @property
    def id(self) -> str | None: ...
    @property
    def function(self) -> _Function: ...


class ChatMessage(Protocol):
    """What counts of a message."""

    @property
    def role(self) -> str:
        """Whose it is."""

    @property
    def tool_calls(self) -> Sequence[_Call] | None:
        """Calls that the assistant made."""

    @property
    def tool_call_id(self) -> str | None:
        """The call that a result answers."""

    @property
    def tool(self) -> str | None:
        """The name of the tool that a result is of."""


def call_id(message: int, at: int, call: _Call) -> str:
    """What the call at place ``at`` of a message is called, also where the client gave it no id."""
    return call.id or f"call_{message}_{at}"


def match_results(messages: Sequence[ChatMessage]) -> list[tuple[int, str | None]]:
    """The places of the messages as they are to be laid out, each result with the id of the call it answers.

    Results that follow each other are taken together, since they may come in any order: first those with an
    id, then those with the name of a tool that was called, then the others in the order of the calls. What
    the user says ends the calls before it. A result that fits no call has an id of its own. Results are laid
    out as their calls are, because many chat templates show neither ids nor names of them.
    """
    ordered: list[tuple[int, str | None]] = []
    calls = _OpenCalls()
    results: list[int] = []
    for number, message in enumerate(messages):
        if message.role == "tool":
            results.append(number)
            continue
        ordered += _answers(messages, results, calls)
        ordered.append((number, None))
        results = []
        if message.role == "user":
            calls = _OpenCalls()
        for at, call in enumerate(message.tool_calls or ()):
            calls.add(call_id(number, at, call), call.function.name)
    return ordered + _answers(messages, results, calls)


def _answers(
    messages: Sequence[ChatMessage], results: Sequence[int], calls: "_OpenCalls"
) -> list[tuple[int, str | None]]:
    """``results`` with the calls that they answer, which are open no more."""
    if not results:
        return []
    answered: dict[int, str] = {}

    def pair(find: Callable[[ChatMessage], str | None]) -> None:
        for number in results:
            if number not in answered and (found := find(messages[number])) is not None:
                answered[number] = found
                calls.close(found)

    pair(lambda result: result.tool_call_id)
    pair(lambda result: result.tool and calls.first_of(result.tool))
    pair(lambda result: None if result.tool else calls.first())
    ordered = sorted(results, key=lambda number: calls.rank(answered.get(number)))
    return [(number, answered.get(number, f"call_{number}")) for number in ordered]


class _OpenCalls:
    """The calls that have no result yet."""

    def __init__(self) -> None:
        # A client may send thousands, whose first must be found at once.
        self._tools: OrderedDict[str, str] = OrderedDict()
        self._by_tool: dict[str, OrderedDict[str, None]] = {}
        self._ranks: dict[str, int] = {}
        self._added = 0

    def add(self, id: str, tool: str) -> None:
        """A tool was called."""
        self.close(id)
        self._tools[id] = tool
        self._by_tool.setdefault(tool, OrderedDict())[id] = None
        self._ranks[id] = self._added
        self._added += 1

    def close(self, id: str) -> None:
        """A call has a result, if it is one."""
        tool = self._tools.pop(id, None)
        if tool is not None:
            del self._by_tool[tool][id]

    def first(self) -> str | None:
        """The first call."""
        return next(iter(self._tools), None)

    def first_of(self, tool: str) -> str | None:
        """The first call of a tool."""
        return next(iter(self._by_tool.get(tool, ())), None)

    def rank(self, id: str | None) -> int:
        """The place of a call, open or not; of what is no call behind all."""
        return self._added if id is None else self._ranks.get(id, self._added)
