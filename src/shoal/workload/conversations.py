"""Conversations of several turns: tables of turns, and ShareGPT's JSON.

Every answer is one request, whose prompt is the whole conversation before it. So its prompt begins with the
prompt of the answer before, and its hashes say so.
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
LARGEST_CONVERSATION = 10**7
"""Most tokens of a conversation: every request has a hash for each ``HASH_TOKENS`` of its prompt."""
_LISTS = ("conversations", "conversation", "messages")
_ROLES, _TEXTS = ("from", "role"), ("value", "content")
_TURN, _OPENAI_TURN = '{"from": "human", "value": "Hello"}', '{"role": "user", "content": "Hello"}'
_ANSWERING = {"gpt", "assistant", "model", "chatgpt", "bing", "bard"}


class _Conversation:
    """One conversation as far as it was read."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        """Its name, which becomes the client of its requests."""
        self.last_turn = -1
        """Number of the last turn."""
        self.tokens = 0
        """Length of all turns."""
        self._first_hash = derive_seed(number) >> 1
        self._hashes: list[int] = []

    def turn(self, role: str, tokens: int) -> Iterator[TraceRow | None]:
        """Add a turn; an answer is a request, or None where it or all before it is empty."""
        if role.strip().lower() in _ANSWERING:
            yield self._request(tokens) if self.tokens and tokens else None
        self.tokens += tokens

    def _request(self, output: int) -> TraceRow:
        full = self.tokens // HASH_TOKENS
        self._hashes.extend(range(self._first_hash + len(self._hashes), self._first_hash + full))
        return TraceRow(0, self.tokens, output, self.name, tuple(self._hashes), HASH_TOKENS)


def read_turns(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """CSV ``conv,turn,role,tokens``: turns of a conversation in rising order. No arrival times."""
    conversations: dict[str, _Conversation] = {}
    for line, (name, turn, role, tokens) in csv_columns(path, TURN_COLUMNS):
        conversation = conversations.setdefault(name, _Conversation(name, len(conversations)))
        number = parse_int(turn, "turn", path, line, least=0)
        if number <= conversation.last_turn:
            expected = f"one after turn {conversation.last_turn}"
            raise line_error(path, line, f"turn {number} of conversation {name}", expected)
        conversation.last_turn = number
        length = parse_int(tokens, "tokens", path, line, least=0)
        if conversation.tokens + length > LARGEST_CONVERSATION:
            wrong = f"conversation {name} has {conversation.tokens + length} tokens with this turn"
            raise line_error(path, line, wrong, f"at most {LARGEST_CONVERSATION}")
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
                raise line_error(path, line, "a turn without texts", f"{_TURN}, or {_OPENAI_TURN}")
            length = count_tokens(text)
            if conversation.tokens + length > LARGEST_CONVERSATION:
                wrong = f"a conversation of more than {LARGEST_CONVERSATION} tokens"
                raise line_error(path, line, wrong, "shorter ones")
            yield from conversation.turn(role, length)


def _first_of(record: object, names: Iterable[str]) -> Any:
    """The first of the named members that an object has; None: it has none, or there is no object."""
    members = record if isinstance(record, dict) else {}
    return next((members[name] for name in names if name in members), None)


def tokens_by_characters(text: str) -> int:
    """A rough length in tokens where there is no tokenizer: a token for every four characters, rounded up."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def _elements(path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON list one after the other, each with the line in which it begins."""
    with open_text(path) as file:
        text = file.read()
    decode = json.JSONDecoder().raw_decode
    line, counted, place = 1, 0, _skip(text, 0)
    ended = text[place : place + 1] != "["
    if ended and place < len(text):
        raise line_error(path, 1, "no JSON list", '[{"conversations": [...]}, ...]')
    place = _skip(text, place + 1)
    while not ended and text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            element, place = decode(text, place)
        except (ValueError, RecursionError) as error:
            raise line_error(path, line, f"not JSON ({error})", '{"conversations": [...]}') from None
        yield line, element
        place = _skip(text, place)
        if text[place : place + 1] not in {",", "]"}:
            wrong = "the file ends inside the list" if place >= len(text) else "no comma after an element"
            raise line_error(path, line + text.count("\n", counted, place), wrong, "',' or ']'")
        place = _skip(text, place + 1) if text[place] == "," else place
    after = _skip(text, place + 1)
    if after < len(text):
        wrong = f"the list has ended, but {text[after : after + 20]!r} follows"
        raise line_error(path, line + text.count("\n", counted, after), wrong, "nothing more")


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
