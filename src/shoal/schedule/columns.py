"""What policies read of many requests, as columns of numbers."""

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from shoal.schedule.members import MEMBER_ROWS, IntArray, member_column
from shoal.schedule.tracked import Tracked

_NUMBER, _SEQUENCE = MEMBER_ROWS, MEMBER_ROWS + 1
_STATIC = MEMBER_ROWS + 2
_EXPECTED, _GENERATED, _CHARGED, _PREDICTED = range(_STATIC, _STATIC + 4)
_ROWS = _STATIC + 4
_DYNAMIC = ("expected", "generated", "charged_ns", "predicted")
_read: Callable[[Tracked], tuple[int, ...]] = attrgetter(*_DYNAMIC)
_READ = {_STATIC + at: attrgetter(name) for at, name in enumerate(_DYNAMIC)}


class Columns:
    """Some requests, and one array for each of their attributes.

    What the requests themselves say counts. Of those attributes that change, a column is made from them when
    somebody asks for it; who changes them says so, and what was said of all of them at once costs next to
    nothing.

    requests: whose columns these are, in this order; a list that may grow and shrink, by ``enter`` and
    ``leave``. Arrays are views: of use until the next change.
    """

    def __init__(self, requests: list[Tracked]) -> None:
        self.requests = requests
        self._table = np.empty((_ROWS, max(64, len(requests) + 1)), dtype=np.int64)
        self._known: set[int] = set(_READ)
        if requests:
            self._table[:, : len(requests)] = np.array(list(map(_column, requests)), dtype=np.int64).T

    @classmethod
    def of(cls, requests: Sequence[Tracked]) -> "Columns":
        """Of any requests."""
        return cls(list(requests))

    def plus(self, one: Tracked) -> "Columns":
        """These and one more at the end; of use until the next change."""
        at = len(self.requests)
        self._reserve(at)
        self._table[:, at] = _column(one)
        longer = object.__new__(Columns)
        longer.requests = [*self.requests, one]
        longer._table, longer._known = self._table, self._known
        return longer

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.requests)

    @property
    def prompt_tokens(self) -> IntArray:
        """Prompt tokens."""
        return self._static(0)

    @property
    def ceilings(self) -> IntArray:
        """Most output tokens."""
        return self._static(1)

    @property
    def numbers(self) -> IntArray:
        """Places in the order of submission."""
        return self._static(_NUMBER)

    @property
    def sequences(self) -> IntArray:
        """Numbers as running requests (0: it does not run)."""
        return self._static(_SEQUENCE)

    @property
    def last_tokens(self) -> IntArray:
        """Tokens of the whole request, where known beforehand, otherwise the most."""
        return self._static(0) + self._static(3)

    @property
    def expected(self) -> IntArray:
        """Tokens known, and those that plans in flight will sample."""
        return self._dynamic(_EXPECTED)

    @property
    def generated(self) -> IntArray:
        """Output tokens known."""
        return self._dynamic(_GENERATED)

    @property
    def charged_ns(self) -> IntArray:
        """Durations of the steps they took part in."""
        return self._dynamic(_CHARGED)

    @property
    def predicted(self) -> IntArray:
        """Output tokens that a length predictor believes of each."""
        return self._dynamic(_PREDICTED)

    def members(self) -> IntArray:
        """A copy of the columns that do not change, as ``Members`` has them."""
        return self._table[:MEMBER_ROWS, : len(self.requests)].copy()

    def _static(self, row: int) -> IntArray:
        column: IntArray = self._table[row, : len(self.requests)]
        return column

    def _dynamic(self, row: int) -> IntArray:
        if row not in self._known:
            self._table[row, : len(self.requests)] = list(map(_READ[row], self.requests))
            self._known.add(row)
        return self._static(row)

    def _reserve(self, at: int) -> None:
        if at == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.empty_like(self._table)), axis=1)

    def enter(self, one: Tracked) -> None:
        """One more, at the end."""
        at = len(self.requests)
        self._reserve(at)
        self._table[:, at] = _column(one)
        self.requests.append(one)

    def leave(self, one: Tracked) -> None:
        """One less."""
        at = self.requests.index(one)
        del self.requests[at]
        left = len(self.requests)
        self._table[:, at:left] = self._table[:, at + 1 : left + 1]

    def planned(self, *, everybody: bool) -> None:
        """A step was planned; with ``everybody``, all of them are to get a token."""
        if not everybody:
            self._known.discard(_EXPECTED)
        elif _EXPECTED in self._known:
            self._table[_EXPECTED, : len(self.requests)] += 1

    def executed(self, requests: int, duration_ns: int, *, everybody: bool) -> None:
        """A step ended in which the first ``requests`` took part.

        everybody: all those got a token.
        """
        if _CHARGED in self._known:
            self._table[_CHARGED, :requests] += duration_ns
        if not everybody:
            self._known.discard(_GENERATED)
        elif _GENERATED in self._known:
            self._table[_GENERATED, :requests] += 1

    def foresaw(self, one: Tracked) -> None:
        """Something else is predicted of one."""
        if _PREDICTED in self._known:
            self._table[_PREDICTED, self.requests.index(one)] = one.predicted

    def forget(self) -> None:
        """What changes may have changed."""
        self._known.clear()


def _column(one: Tracked) -> tuple[int, ...]:
    return (*member_column(one), one.number, one.sequence or 0, *_read(one))
