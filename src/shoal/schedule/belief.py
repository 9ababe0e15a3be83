"""Which output lengths an admission believes in, and what follows for memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np

from shoal.schedule.members import IntArray
from shoal.schedule.tracked import Tracked

if TYPE_CHECKING:
    from shoal.schedule.crowd import Crowd


class Belief(Protocol):
    """Which output lengths somebody believes in; one object says the same of the same crowd whenever asked.

    What is believed of a request must not depend on the others in the crowd. Then one more request costs
    little where the crowd without it has been forecast already.

    lasting: while a request only runs on, the same is mostly believed of it.
    """

    lasting: ClassVar[bool]

    def lengths(self, crowd: "Crowd") -> IntArray:
        """Of all requests in a crowd [draws, n]."""
        ...

    def length_of(self, one: Tracked, crowd: "Crowd") -> Sequence[int]:
        """Of one request of a crowd alone [draws]."""
        ...


class Peaks:
    """When the most was held by the last forecast of one service, for each belief.

    Where beliefs last, this is a moment worth looking at before others.
    """

    def __init__(self) -> None:
        self._done = 0
        self._at: dict[Belief, IntArray] = {}

    def stepped(self) -> None:
        """A step is over."""
        self._done += 1

    def note(self, belief: Belief, steps: IntArray) -> None:
        """The most is held in so many ``steps`` [draws]."""
        self._at[belief] = steps + self._done

    def steps(self, belief: Belief) -> IntArray | None:
        """In how many steps from now [draws]; None before the first forecast."""
        at = self._at.get(belief)
        return None if at is None else np.maximum(at - self._done, 0)


class Bounds(NamedTuple):
    """Between which numbers the most blocks held at once lie, for each draw."""

    low: Sequence[int]
    high: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Draws:
    lasting: ClassVar[bool] = False

    samples: int

    def lengths(self, crowd: "Crowd") -> IntArray:
        members = crowd.members
        return crowd.lengths.draw(members.seeds, crowd.generated, members.ceilings, self.samples)

    def length_of(self, one: Tracked, crowd: "Crowd") -> Sequence[int]:
        return crowd.lengths.draw_one(one.seed, one.generated, one.ceiling, self.samples)


@lru_cache(maxsize=64)
def draws(samples: int) -> Belief:
    """Lengths drawn from those of the recent past, anew after every token; of each so many draws."""
    return _Draws(samples)


@dataclass(frozen=True, slots=True, eq=False)
class _Predictions:
    lasting: ClassVar[bool] = True

    def lengths(self, crowd: "Crowd") -> IntArray:
        return crowd.predicted[None, :]

    def length_of(self, one: Tracked, crowd: "Crowd") -> Sequence[int]:
        return (one.predicted,)


PREDICTIONS: Belief = _Predictions()
"""Lengths that a predictor gave each request."""


@dataclass(frozen=True, slots=True, eq=False)
class _Truths:
    lasting: ClassVar[bool] = True

    def lengths(self, crowd: "Crowd") -> IntArray:
        return crowd.members.truths[None, :]

    def length_of(self, one: Tracked, crowd: "Crowd") -> Sequence[int]:
        return (one.last_token - one.prompt_tokens,)


TRUTHS: Belief = _Truths()
"""Lengths known beforehand."""
