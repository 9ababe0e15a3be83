"""What becomes of the fields of a request that have no name here.

A field that is not known is ignored, as most servers do, unless ignoring it could change the answer: a name
that is nearly one of ours is a mistake, one that another route has is at the wrong place, and within what
limits the output nothing may be lost. ``neutral`` and ``foreign_fields`` have names of fields that are known
and not implemented.
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
# To look for a name that is nearly so takes up to a millisecond.
_MAX_UNKNOWN_NAMES = 128
# Names without capitals and separators of up to so many characters have so many edits; longer ones two.
_SHORTEST_WITH_ONE_EDIT, _SHORTEST_WITH_TWO_EDITS, _MOST_EDITS = 3, 6, 2
_SEPARATORS = re.compile(r"[_\-. ]")
# Fields of other servers that are nearly called like ours, and do not bear on the output.
_HARMLESS = frozenset({"conversation_id", "mode", "models", "n_keep", "name1", "name2", "speed", "temp_last"})
_log = logging.getLogger(__name__)


class Kind(Protocol):
    """A type of objects in a body."""

    limits_output: ClassVar[bool]
    asks_for_text: ClassVar[bool]
    other_names: ClassVar[Mapping[str, str]]

    @classmethod
    def known_names(cls) -> frozenset[str]:
        """Names of its fields."""

    @classmethod
    def named_with_effect(cls) -> frozenset[str]:
        """Those that are not ignored, and other servers' names of them."""

    @classmethod
    def refused_names(cls) -> Collection[str]:
        """Further names that are not ignored."""


@dataclass(slots=True)
class Reading:
    """One body that is being read: pydantic's context."""

    refuses: bool
    """Whether no unknown field is ignored."""
    elsewhere: frozenset[str]
    """Names of fields that some other body has and that bear on its output."""
    ignored: set[tuple[type, str]] = field(default_factory=set)
    """Types of objects, and names of their fields that were left out."""
    renamed: dict[str, str] = field(default_factory=dict)
    """What the client called fields of the body, by our names."""

    def known(self, kind: type[Kind], sent: dict[str, Any]) -> dict[str, Any]:
        """``sent`` without the fields that are ignored, and with our names; others stay, to be refused.

        Raises InvalidRequest where a field has two names and two values.
        """
        names = kind.known_names()
        if sent.keys() <= names:
            return sent
        kept: dict[str, Any] = {name: value for name, value in sent.items() if name in names}
        for name, value in sent.items():
            if name in names or (value is None and (name in kind.other_names or not self.refuses)):
                continue
            if name in kind.other_names:
                self._rename(kind.other_names[name], name, value, kept)
            elif not self.refuses and name in self.elsewhere and _asks_for_nothing(value):
                self._ignore(kind, name)
            elif self.refuses or self._is_refused(kind, name):
                kept[name] = value
            else:
                self._ignore(kind, name)
        return kept

    def _ignore(self, kind: type[Kind], name: str) -> None:
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

    def _is_refused(self, kind: type[Kind], name: str) -> bool:
        if kind.limits_output or name in kind.refused_names():
            return True
        return meant_name(name, kind, self.elsewhere) is not None


def _asks_for_nothing(value: object) -> bool:
    """Whether a field with this value is the same as none, whatever it means on its route."""
    return value is False or value in ("", [], {})


class IgnoredFields:
    """Tells the log of each ignored field once, up to a hundred."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Fields of a body were ignored."""
        for name in names:
            if name in self._names or len(self._names) > _MAX_LOGGED_NAMES:
                continue
            self._names.add(name)
            if len(self._names) > _MAX_LOGGED_NAMES:
                _log.warning("requests have further unknown fields; those are ignored without a line here")
            else:
                _log.warning("requests have the unknown field %r; it is ignored", name)


def meant_name(name: str, kind: type[Kind], elsewhere: frozenset[str]) -> str | None:
    """The field that an unknown one of ``kind`` is likely to be meant for, if it bears on the output.

    elsewhere: names of such fields of other bodies.
    """
    return near_name(name, *_names(kind, elsewhere))


@lru_cache(64)
def _names(kind: type[Kind], elsewhere: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Names that may be meant: those that must not be lost, and those that may."""
    own = kind.named_with_effect()
    guarded = own | (elsewhere - kind.known_names() if kind.asks_for_text else frozenset())
    return guarded, _HARMLESS | kind.known_names() - own


@lru_cache(4096)
def near_name(name: str, names: frozenset[str], others: frozenset[str] = frozenset()) -> str | None:
    """The one of ``names`` that ``name`` is likely to be meant for, unless it is nearer to one of ``others``.

    It is the nearest within two edits, or one where a name is short: letters that are added, left out,
    replaced or swapped with their neighbours (Damerau and Levenshtein). Capitals and separators do not count.
    """
    nearest, nearest_other = _nearest(name, names), _nearest(name, others)
    if nearest is None or (nearest_other is not None and nearest_other[0] < nearest[0]):
        return None
    return nearest[1]


def _nearest(name: str, names: frozenset[str]) -> tuple[int, str] | None:
    """How many edits away the nearest of ``names`` is, and it."""
    if len(name) > MAX_NAME_CHARACTERS:
        return None
    plain, by_length = _plain(name), _by_length(names)
    letters = _letters(plain)
    found = [
        (edits, other)
        for length in range(len(plain) - _MOST_EDITS, len(plain) + _MOST_EDITS + 1)
        for other_plain, other_letters, allowed, other in by_length.get(length, ())
        # An edit brings in one letter at most, and takes away one. To count edits takes longer.
        if (letters ^ other_letters).bit_count() <= 2 * allowed
        and (edits := _edits(plain, other_plain)) <= allowed
    ]
    return min(found, default=None)


@lru_cache(64)
def _by_length(names: frozenset[str]) -> Mapping[int, list[tuple[str, int, int, str]]]:
    """By the length of what counts of it, for each name: that, its letters, the edits it may have, and it."""
    by_length: dict[int, list[tuple[str, int, int, str]]] = {}
    for name in names:
        plain = _plain(name)
        by_length.setdefault(len(plain), []).append((plain, _letters(plain), _allowed_edits(plain), name))
    return by_length


def _letters(plain: str) -> int:
    """Which letters there are, as bits."""
    bits = 0
    for letter in plain:
        bits |= 1 << (ord(letter) % 64)
    return bits


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name).lower()


def _allowed_edits(plain: str) -> int:
    return (len(plain) >= _SHORTEST_WITH_ONE_EDIT) + (len(plain) >= _SHORTEST_WITH_TWO_EDITS)


def _edits(one: str, other: str) -> int:
    """How many letters must be added, left out, replaced or swapped to make one text of the other."""
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
