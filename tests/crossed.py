"""Parameters of tests that are crossed: a few of all combinations are quick, the rest is slow."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Parameter = type(pytest.param())


def crossed(*axes: Iterable[Any], of_each: int = 1) -> list[Any]:
    """All combinations of the axes' values, of which enough are quick that each value is among them.

    of_each: how many axes go together: 2 for every pair of values of two axes. Values may be
    ``pytest.param`` with marks; combinations with such, which may be skipped, are quick for their sake only.
    """
    values = [[_one(value) for value in axis] for axis in axes]
    every = list(product(*(range(len(axis)) for axis in values)))
    marked = {(at, place) for at, axis in enumerate(values) for place, (_, own) in enumerate(axis) if own}
    quick = set(_covering(every, marked, of_each))
    made = []
    for places in every:
        chosen = [axis[at] for axis, at in zip(values, places, strict=True)]
        marks = [mark for _, own in chosen for mark in own]
        if places not in quick:
            marks.append(pytest.mark.slow)
        made.append(pytest.param(*(value for value, _ in chosen), marks=marks))
    return made


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """So many combinations of the axes' values that every pair of values is among them."""
    return [param for param in crossed(*axes, of_each=2) if pytest.mark.slow not in param.marks]


def each_nth(values: Iterable[Any], count: int, at: int = 0) -> list[Any]:
    """All values, of which each ``count``-th is quick, beginning with number ``at``.

    For several tests of the same values, each of which begins elsewhere.
    """
    return [
        pytest.param(value, marks=() if number % count == at else pytest.mark.slow)
        for number, value in enumerate(values)
    ]


def _one(value: Any) -> tuple[Any, Sequence[Any]]:
    """The value and its marks."""
    return (value.values[0], tuple(value.marks)) if isinstance(value, Parameter) else (value, ())


def _covering(
    every: Sequence[tuple[int, ...]], marked: Collection[tuple[int, int]], of_each: int
) -> list[tuple[int, ...]]:
    """Some of the combinations, taken greedily, with everything that ``of_each`` places can say in all.

    marked: axes and places on them of values with marks.
    """

    def says(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        certain = not any(value in marked for value in enumerate(places))
        said = combinations(enumerate(places), of_each)
        return {part for part in said if certain or any(value in marked for value in part)}

    left = set().union(*map(says, every))
    uses = Counter[tuple[int, int]]()
    chosen = []
    while left:
        # Of those that say the most, one whose values have come least.
        best = max(every, key=lambda at: (len(says(at) & left), -sum(uses[value] for value in enumerate(at))))
        chosen.append(best)
        uses.update(enumerate(best))
        left -= says(best)
    return chosen
