"""Trace formats: conversations of several turns, as CSV tables of turns or ShareGPT's JSON.

Every assistant turn is one request, whose prompt is the whole conversation before it. So prompts of a
conversation share prefixes, as their hashes do.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shoal.core import derive_seed
from shoal.workload.lines import ReadOptions, csv_columns, line_error, open_text, parse_int
from shoal.workload.rows import TraceRow

TURN_COLUMNS = ("conv", "turn", "role", "tokens")
CHARACTERS_PER_TOKEN = 4
HASH_TOKENS = 16
MAX_CONVERSATION_TOKENS = 10**7
"""Limits memory: every request has a hash for each ``HASH_TOKENS`` of its prompt."""
_LISTS = ("conversations", "conversation", "messages")
_ROLES, _TEXTS = ("from", "role"), ("value", "content")
_EXAMPLE, _OPENAI_EXAMPLE = '{"from": "human", "value": "Hello"}', '{"role": "user", "content": "Hello"}'
_ASSISTANT_ROLES = {"gpt", "assistant", "model", "chatgpt", "bing", "bard"}


class _Conversation:
    """One conversation, up to the current turn."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        """The client of its requests."""
        self.last_turn = -1
        self.tokens = 0
        """Length of all turns."""
        self._first_hash = derive_seed(number) >> 1
        self._hashes: list[int] = []

    def turn(self, role: str, tokens: int) -> Iterator[TraceRow | None]:
        """Add a turn; an assistant's turn yields a request, or None if its prompt or output is empty."""
        if role.strip().lower() in _ASSISTANT_ROLES:
            yield self._request(tokens) if self.tokens and tokens else None
        self.tokens += tokens

    def _request(self, output: int) -> TraceRow:
        full = self.tokens // HASH_TOKENS
        self._hashes.extend(range(self._first_hash + len(self._hashes), self._first_hash + full))
        return TraceRow(0, self.tokens, output, self.name, tuple(self._hashes), HASH_TOKENS)


def read_turns(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """CSV ``conv,turn,role,tokens`` with increasing turns of each conversation, without arrival times."""
    conversations: dict[str, _Conversation] = {}
    for line, (name, turn, role, tokens) in csv_columns(path, TURN_COLUMNS):
        conversation = conversations.setdefault(name, _Conversation(name, len(conversations)))
        number = parse_int(turn, "turn", path, line, least=0)
        if number <= conversation.last_turn:
            expected = f"one after turn {conversation.last_turn}"
            raise line_error(path, line, f"turn {number} of conversation {name}", expected)
        conversation.last_turn = number
        length = parse_int(tokens, "tokens", path, line, least=0)
        if conversation.tokens + length > MAX_CONVERSATION_TOKENS:
            wrong = f"conversation {name} has {conversation.tokens + length} tokens with this turn"
            raise line_error(path, line, wrong, f"at most {MAX_CONVERSATION_TOKENS}")
        yield from conversation.turn(role, length)


def read_sharegpt(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """A JSON list of ``{"id": ..., "conversations": [{"from": "human", "value": text}, ...]}``.

    Turns may also have OpenAI's keys ``role`` and ``content``, and their list may be called ``conversation``
    or ``messages``.
    """
    count_tokens = options.count_tokens or tokens_by_characters
    for number, (line, record) in enumerate(_elements(path)):
        turns = _first_of(record, _LISTS)
        if not isinstance(turns, list):
            raise line_error(path, line, "no list 'conversations'", '{"conversations": [...]}')
        conversation = _Conversation(str(record.get("id", number)), number)
        for turn in turns:
            role, text = (_first_of(turn, names) for names in (_ROLES, _TEXTS))
            if not isinstance(role, str) or not isinstance(text, str):
                raise line_error(path, line, "a turn without texts", f"{_EXAMPLE}, or {_OPENAI_EXAMPLE}")
            length = count_tokens(text)
            if conversation.tokens + length > MAX_CONVERSATION_TOKENS:
                wrong = f"a conversation of more than {MAX_CONVERSATION_TOKENS} tokens"
                raise line_error(path, line, wrong, "shorter ones")
            yield from conversation.turn(role, length)


def _first_of(record: object, names: Iterable[str]) -> Any:
    """The first of the named members that exists; None if there is none, or ``record`` is not an object."""
    members = record if isinstance(record, dict) else {}
    return next((members[name] for name in names if name in members), None)


def tokens_by_characters(text: str) -> int:
    """An estimate of the length in tokens without a tokenizer: one token per four characters, rounded up."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def _elements(path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON list, each with the line where it begins."""
    with open_text(path) as file:
        text = file.read()
    decode = json.JSONDecoder().raw_decode
    line, counted, position = 1, 0, _skip_blanks(text, 0)
    ended = text[position : position + 1] != "["
    if ended and position < len(text):
        raise line_error(path, 1, "no JSON list", '[{"conversations": [...]}, ...]')
    position = _skip_blanks(text, position + 1)
    while not ended and text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            element, position = decode(text, position)
        except (ValueError, RecursionError) as error:
            raise line_error(path, line, f"not JSON ({error})", '{"conversations": [...]}') from None
        yield line, element
        position = _skip_blanks(text, position)
        if text[position : position + 1] not in {",", "]"}:
            wrong = "the file ends inside the list" if position >= len(text) else "no comma after an element"
            raise line_error(path, line + text.count("\n", counted, position), wrong, "',' or ']'")
        position = _skip_blanks(text, position + 1) if text[position] == "," else position
    end = _skip_blanks(text, position + 1)
    if end < len(text):
        wrong = f"the list has ended, but {text[end : end + 20]!r} follows"
        raise line_error(path, line + text.count("\n", counted, end), wrong, "nothing more")


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
