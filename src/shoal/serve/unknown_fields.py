"""Unknown fields of request bodies: ignored and logged, or refused if they may be misspelled known fields.

Most servers ignore unknown fields. This one refuses a field whose name is similar to a known one, that
belongs to another route, or that is in an object that constrains the output. ``openai/inert_fields.py`` and
``openai/other_server_fields.py`` have the fields that are known but not implemented.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from shoal.core import InvalidRequest
from shoal.serve.http.error_responses import shorten

MAX_NAME_CHARACTERS = 80
"""Errors and the log quote names of fields up to this length."""
_MAX_LOGGED_NAMES = 100
# The search for a similar name takes up to a millisecond.
_MAX_UNKNOWN_NAMES = 128
# Normalized names from these lengths on may differ by one edit and by two.
_SHORTEST_WITH_ONE_EDIT, _SHORTEST_WITH_TWO_EDITS, _MAX_EDITS = 3, 6, 2
_SEPARATORS = re.compile(r"[_\-. ]")
# Fields of other servers with names similar to ours that do not affect the output.
_HARMLESS_NAMES = frozenset(
    {"conversation_id", "mode", "models", "n_keep", "name1", "name2", "speed", "temp_last"}
)
_log = logging.getLogger(__name__)


class ObjectType(Protocol):
    """A type of JSON objects in a body; ``StrictModel`` implements it."""

    limits_output: ClassVar[bool]
    generates_text: ClassVar[bool]
    aliases: ClassVar[Mapping[str, str]]

    @classmethod
    def known_names(cls) -> frozenset[str]: ...

    @classmethod
    def effective_names(cls) -> frozenset[str]:
        """Names and aliases of the fields that are not ignored."""

    @classmethod
    def refused_names(cls) -> Collection[str]:
        """Names of unknown fields that are refused rather than ignored."""


@dataclass(slots=True)
class ParsingContext:
    """State of parsing one body: pydantic's validation context."""

    refuses: bool
    """Whether all unknown fields are refused."""
    output_fields: frozenset[str]
    """Names of all fields that affect an output, in any body."""
    ignored: set[tuple[type, str]] = field(default_factory=set)
    """Ignored fields: type of their object, and name."""
    renamed: dict[str, str] = field(default_factory=dict)
    """The client's names of fields, by our names."""

    def filter_fields(self, kind: type[ObjectType], sent: dict[str, Any]) -> dict[str, Any]:
        """``sent`` with aliases replaced and without ignored fields; fields to be refused stay.

        Raises InvalidRequest where a field has two names and two values.
        """
        names = kind.known_names()
        if sent.keys() <= names:
            return sent
        kept: dict[str, Any] = {name: value for name, value in sent.items() if name in names}
        for name, value in sent.items():
            if name in names or (value is None and (name in kind.aliases or not self.refuses)):
                continue
            if name in kind.aliases:
                self._rename(kind.aliases[name], name, value, kept)
            elif not self.refuses and name in self.output_fields and _is_off(value):
                self._ignore(kind, name)
            elif self.refuses or self._is_refused(kind, name):
                kept[name] = value
            else:
                self._ignore(kind, name)
        return kept

    def _ignore(self, kind: type[ObjectType], name: str) -> None:
        self.ignored.add((kind, shorten(name, MAX_NAME_CHARACTERS)))
        if len(self.ignored) > _MAX_UNKNOWN_NAMES:
            raise InvalidRequest(f"the body has more than {_MAX_UNKNOWN_NAMES} unknown fields")

    def _rename(self, ours: str, theirs: str, value: Any, kept: dict[str, Any]) -> None:
        if kept.get(ours) is None:
            kept[ours] = value
            self.renamed[ours] = theirs
        elif kept[ours] != value:
            other = self.renamed.get(ours, ours)
            raise InvalidRequest(f"{theirs} and {other} are two names of one field; give one", param=theirs)

    def _is_refused(self, kind: type[ObjectType], name: str) -> bool:
        if kind.limits_output or name in kind.refused_names():
            return True
        return intended_name(name, kind, self.output_fields) is not None


def _is_off(value: object) -> bool:
    """Whether this value turns a field off, whatever the field means on its route."""
    return value is False or value in ("", [], {})


class IgnoredFieldLog:
    """Logs each ignored field once, up to a hundred names."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: Iterable[str]) -> None:
        """Log the ignored fields of a body that were not logged before."""
        for name in names:
            if name in self._logged or len(self._logged) > _MAX_LOGGED_NAMES:
                continue
            self._logged.add(name)
            if len(self._logged) > _MAX_LOGGED_NAMES:
                _log.warning("requests have further unknown fields; those are ignored without a line here")
            else:
                _log.warning("requests have the unknown field %r; it is ignored", name)


def intended_name(name: str, kind: type[ObjectType], output_fields: frozenset[str]) -> str | None:
    """The known field of which ``name`` is likely a misspelling, if it affects the output; else None."""
    return nearest_name(name, *_candidates(kind, output_fields))


@lru_cache(64)
def _candidates(
    kind: type[ObjectType], output_fields: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a misspelling may stand for: of fields that affect the output, and of harmless fields."""
    own = kind.effective_names()
    guarded = own | (output_fields - kind.known_names() if kind.generates_text else frozenset())
    return guarded, _HARMLESS_NAMES | kind.known_names() - own


@lru_cache(4096)
def nearest_name(name: str, names: frozenset[str], others: frozenset[str] = frozenset()) -> str | None:
    """The nearest of ``names`` within the allowed edits, unless one of ``others`` is nearer; else None.

    Edits are counted as Damerau-Levenshtein distance, without case and separators. Two are allowed, or one
    for short names.
    """
    nearest, nearest_other = _nearest(name, names), _nearest(name, others)
    if nearest is None or (nearest_other is not None and nearest_other[0] < nearest[0]):
        return None
    return nearest[1]


def _nearest(name: str, names: frozenset[str]) -> tuple[int, str] | None:
    """The edit distance of the nearest of ``names``, and that name."""
    if len(name) > MAX_NAME_CHARACTERS:
        return None
    normalized, by_length = _normalize(name), _by_length(names)
    letters = _letters(normalized)
    found = [
        (edits, other)
        for length in range(len(normalized) - _MAX_EDITS, len(normalized) + _MAX_EDITS + 1)
        for other_normalized, other_letters, allowed, other in by_length.get(length, ())
        # A cheap filter first: an edit adds at most one letter to the set, and removes at most one.
        if (letters ^ other_letters).bit_count() <= 2 * allowed
        and (edits := _edits(normalized, other_normalized)) <= allowed
    ]
    return min(found, default=None)


@lru_cache(64)
def _by_length(names: frozenset[str]) -> Mapping[int, list[tuple[str, int, int, str]]]:
    """By normalized length: (normalized name, its letters, allowed edits, name)."""
    by_length: dict[int, list[tuple[str, int, int, str]]] = {}
    for name in names:
        normalized = _normalize(name)
        by_length.setdefault(len(normalized), []).append(
            (normalized, _letters(normalized), _allowed_edits(normalized), name)
        )
    return by_length


def _letters(normalized: str) -> int:
    """The set of letters, as bits."""
    bits = 0
    for letter in normalized:
        bits |= 1 << (ord(letter) % 64)
    return bits


def _normalize(name: str) -> str:
    return _SEPARATORS.sub("", name).lower()


def _allowed_edits(normalized: str) -> int:
    return (len(normalized) >= _SHORTEST_WITH_ONE_EDIT) + (len(normalized) >= _SHORTEST_WITH_TWO_EDITS)


def _edits(one: str, other: str) -> int:
    """The Damerau-Levenshtein distance (optimal string alignment) of two texts."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        earlier, before, row = before, row, [i + 1]
        for j, own in enumerate(other):
            cost = min(before[j + 1] + 1, row[j] + 1, before[j] + (letter != own))
            if i and j and letter == other[j - 1] and one[i - 1] == own:
                cost = min(cost, earlier[j - 1] + 1)
            row.append(cost)
    return row[-1]
