"""What an admission looks at when it asks whether one more fits: a crowd, and who would join it."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from shoal.forecast import LengthDistribution, SharedBlocks, Timeline
from shoal.schedule.belief import Belief, Bounds
from shoal.schedule.crowd import Crowd
from shoal.schedule.line import Line
from shoal.schedule.members import IntArray, Members, member_column
from shoal.schedule.tracked import Tracked

FEW = 2
"""For so many more requests a timeline is continued; for more of them a new one costs less."""


class LargerCrowd(Crowd):
    """A crowd and one more request, the newest.

    What can be had by adding the newest's share to the crowd before it is not counted anew; columns are
    written out only for a forecast that needs them.

    Beliefs about lengths stay those of the crowd before. shared: blocks that several hold, the newest
    included. line, place: where the newest stands among others that are forecast together.
    """

    def __init__(
        self,
        before: Crowd,
        newest: Tracked,
        shared: SharedBlocks | None,
        line: Line | None = None,
        place: int = 0,
    ) -> None:
        self.layout = before.layout
        self.block_size = size = before.block_size
        self.shared = shared
        self.peaks = before.peaks
        self._before = before
        self._root: Crowd = before._root if isinstance(before, LargerCrowd) else before
        self._newest = newest
        self._line, self._place = line, place
        self._count = len(before) + 1
        self._newest_tokens = tokens = newest.expected
        self._left = {}
        self._timelines = {}
        self._bounds = {}
        self._newest_lefts: dict[Belief, list[int]] = {}
        self.own_blocks = before.own_blocks - (-tokens // size)
        if shared is before.shared:
            self._surplus = before._surplus

    def adds(self, one: Tracked, before: Crowd) -> bool:
        """Whether this is the crowd ``before`` and ``one``."""
        return self._newest is one and self._before is before

    @cached_property
    def most_own_blocks(self) -> int:
        """The same if every output is as long as it may be, and none leaves before another."""
        further = max(self._newest.ceiling - self._newest.generated - 1, 0)
        return self._before.most_own_blocks - (-(self._newest_tokens + further) // self.block_size)

    @cached_property
    def members(self) -> Members:
        """The columns that do not change."""
        columns = np.array([member_column(one) for one in self._added], dtype=np.int64)
        return Members(np.concatenate((self._root.members.table, columns.T), axis=1), self.shared)

    @cached_property
    def tokens(self) -> IntArray:
        """Known tokens of each."""
        return np.concatenate((self._root.tokens, [one.expected for one in self._added]))

    @cached_property
    def predicted(self) -> IntArray:
        """Output tokens that a length predictor believes of each."""
        return np.concatenate((self._root.predicted, [one.predicted for one in self._added]))

    @property
    def _added(self) -> list[Tracked]:
        """The requests that the root has not, in order."""
        added: list[Tracked] = []
        crowd: Crowd = self
        while isinstance(crowd, LargerCrowd):
            added.append(crowd._newest)
            crowd = crowd._before
        added.reverse()
        return added

    @property
    def lengths(self) -> LengthDistribution:
        """What was believed about output lengths before anybody was added."""
        return self._root.lengths

    def bounds(self, belief: Belief) -> Bounds:
        """Between which numbers of blocks M* lies: at most the newest adds all that it will ever hold.

        Exact where others stand in line, who will ask next.
        """
        if self._line is not None and belief not in self._bounds:
            peak = self._line.outlook(belief).peaks[self._place]
            self._bounds[belief] = Bounds(peak, peak)
        crowd, larger = self._since(lambda crowd: belief in crowd._bounds)
        bounds = crowd._bounds.get(belief)
        if bounds is None:
            return Crowd.bounds(self, belief)
        for one in larger:
            ends = one._newest_tokens + one.block_size - 1
            own = [(ends + left) // one.block_size for left in one._newest_left(belief)]
            bounds = Bounds(bounds.low, [most + more for most, more in zip(bounds.high, own, strict=True)])
            one._bounds[belief] = bounds
        return bounds

    def known_peak(self, belief: Belief) -> Sequence[int] | None:
        """M* [draws], where it is at hand."""
        if self._line is None or not self._line.is_forecast(belief):
            return Crowd.known_peak(self, belief)
        return self._line.outlook(belief).peaks[self._place]

    def _forecast(self, belief: Belief) -> Timeline:
        if self._line is not None and self._place == len(self._line.newest) - 1:
            return self._line.outlook(belief).timeline
        crowd, larger = self._since(lambda crowd: belief in crowd._timelines)
        timeline = crowd._timelines.get(belief)
        if timeline is None:
            return Crowd._forecast(self, belief)
        if len(larger) > FEW:
            return self.demand.timeline(self.left(belief))
        left = np.array([one._newest_left(belief) for one in larger], dtype=np.int64)
        longer, _ = timeline.plus(np.array([one._newest_tokens for one in larger]), left.T)
        return longer

    def _newest_left(self, belief: Belief) -> list[int]:
        """Tokens that the newest still has to store [draws]."""
        left = self._newest_lefts.get(belief)
        if left is None:
            left = self._newest_lefts[belief] = self.left_of(self._newest, belief)
        return left

    def _is_forecast(self, belief: Belief) -> bool:
        # Of those who are added later, what was found out about the first says more.
        return self._before is not self._root or self._root._is_forecast(belief)

    def left(self, belief: Belief) -> IntArray:
        """Tokens still to be stored, if outputs are as long as believed [draws, n]."""
        left = self._left.get(belief)
        if left is None:
            crowd, larger = self._since(lambda crowd: belief in crowd._left)
            left = Crowd.left(crowd, belief)
            if larger:
                newest = np.array([one._newest_left(belief) for one in larger], dtype=np.int64)
                left = self._left[belief] = np.concatenate((left, newest.T), axis=1)
        return left

    def _held_after(self, belief: Belief, steps: IntArray) -> list[int]:
        if self.shared is not self._before.shared:
            return Crowd._held_after(self, belief, steps)
        up = self._newest_tokens + self.block_size - 1
        return [
            held + (up + at) // self.block_size if left >= at else held
            for held, left, at in zip(
                self._before._held_after(belief, steps),
                self._newest_left(belief),
                steps.tolist(),
                strict=True,
            )
        ]

    def _since(self, known: Callable[[Crowd], bool]) -> tuple[Crowd, list["LargerCrowd"]]:
        """The last crowd of which something is ``known``, and those after it, this one at the end.

        Nothing is known of the one returned where there is none, or where one that shares blocks comes first.
        """
        larger: list[LargerCrowd] = []
        crowd: Crowd = self
        while isinstance(crowd, LargerCrowd) and crowd.shared is crowd._before.shared and not known(crowd):
            larger.append(crowd)
            crowd = crowd._before
        larger.reverse()
        return crowd, larger


def plus_each(crowd: Crowd, newest: Sequence[Tracked]) -> Sequence[LargerCrowd]:
    """``crowd`` with the first of ``newest``, with the first two, ...; none of them shares a block.

    Where one of these crowds must be forecast, one computation does for all.
    """
    line = Line(crowd, newest) if len(newest) > 1 else None
    crowds: list[LargerCrowd] = []
    for place, one in enumerate(newest):
        before = crowds[-1] if crowds else crowd
        crowds.append(LargerCrowd(before, one, crowd.shared, line, place))
    return crowds
