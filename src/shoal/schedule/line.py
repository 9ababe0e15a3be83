"""Newcomers who may join one after another: what each makes of a forecast, counted for all at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shoal.forecast import Timeline
from shoal.schedule.belief import Belief
from shoal.schedule.members import IntArray
from shoal.schedule.tracked import Tracked

if TYPE_CHECKING:
    from shoal.schedule.crowd import Crowd


FEW = 2
"""What is believed of more than so many is asked of all at once."""


class Outlook(NamedTuple):
    """What is foreseen of a line.

    peaks: the most blocks held at once when the first, the first two, ... have joined [k][draws].
    timeline: when all have.
    """

    peaks: Sequence[Sequence[int]]
    timeline: Timeline


class Line:
    """Those who may join the crowd ``before``, in this order, and share no blocks."""

    def __init__(self, before: "Crowd", newest: Sequence[Tracked]) -> None:
        self.before = before
        self.newest = newest
        self._outlooks: dict[Belief, Outlook] = {}

    def is_forecast(self, belief: Belief) -> bool:
        """Whether the outlook is at hand."""
        return belief in self._outlooks

    def outlook(self, belief: Belief) -> Outlook:
        """What is foreseen if outputs are as long as believed; looked at once."""
        outlook = self._outlooks.get(belief)
        if outlook is None:
            tokens = np.array([one.expected for one in self.newest], dtype=np.int64)
            timeline, peaks = self.before.timeline(belief).plus(tokens, self._left(belief))
            outlook = self._outlooks[belief] = Outlook(peaks.tolist(), timeline)
        return outlook

    def _left(self, belief: Belief) -> IntArray:
        """Tokens that each still has to store [draws, k]."""
        if len(self.newest) > FEW:
            alone = self.before.apart(self.newest)
            return alone.remaining(belief.lengths(alone))
        return np.array([self.before.left_of(one, belief) for one in self.newest], dtype=np.int64).T
