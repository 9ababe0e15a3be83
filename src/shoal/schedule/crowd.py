"""What an admission looks at: the requests that hold memory, as columns of numbers."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shoal.forecast import (
    Demand,
    LengthDistribution,
    LengthHistory,
    SharedBlocks,
    Timeline,
    blocks_in,
)
from shoal.kvcache import ServiceLayout
from shoal.schedule.belief import Belief, Bounds, Peaks
from shoal.schedule.line import Line
from shoal.schedule.members import IntArray, Members, member_column
from shoal.schedule.tracked import Tracked

FEW = 2
"""For so many more requests a timeline is continued; for more of them a new one costs less."""


class Crowd:
    """An immutable snapshot of one service's requests that hold memory.

    count: how many. shared: blocks that several of them hold. members, tokens: their columns, and the known
    tokens of each. predicted: the output tokens that a length predictor believes of each. lengths: what the
    service's history says about output lengths. These four are functions, so that nobody pays for them who
    does not ask. peaks: when most was held by earlier forecasts for the same service. own_blocks,
    most_own_blocks: as below, where they are known already.
    """

    def __init__(
        self,
        layout: ServiceLayout,
        block_size: int,
        count: int,
        shared: SharedBlocks | None,
        members: Callable[[], Members],
        tokens: Callable[[], IntArray],
        predicted: Callable[[], IntArray],
        lengths: Callable[["Crowd"], LengthDistribution],
        *,
        peaks: Peaks | None = None,
        own_blocks: int | None = None,
        most_own_blocks: int | None = None,
    ) -> None:
        self.layout = layout
        self.block_size = block_size
        self.shared = shared
        self.peaks = Peaks() if peaks is None else peaks
        self._count = count
        self._members = members
        self._tokens = tokens
        self._predicted = predicted
        self._lengths = lengths
        if own_blocks is not None:
            self.own_blocks = own_blocks
        if most_own_blocks is not None:
            self.most_own_blocks = most_own_blocks
        self._left: dict[Belief, IntArray] = {}
        self._timelines: dict[Belief, Timeline] = {}
        self._bounds: dict[Belief, Bounds] = {}

    @classmethod
    def of(
        cls,
        layout: ServiceLayout,
        block_size: int,
        members: Members,
        requests: Sequence[Tracked],
        history: LengthHistory,
    ) -> "Crowd":
        """A snapshot of ``requests``, whose columns are ``members``; of no use once one of them changes."""
        return cls(
            layout,
            block_size,
            len(requests),
            members.shared,
            lambda: members,
            lambda: np.array([one.expected for one in requests], dtype=np.int64),
            lambda: np.array([one.predicted for one in requests], dtype=np.int64),
            lambda crowd: history.distribution(crowd.generated),
        )

    def plus(self, request: Tracked, shared: SharedBlocks | None) -> "Crowd":
        """This crowd and one more request; beliefs about lengths stay those of this crowd."""
        return LargerCrowd(self, request, shared)

    def plus_each(self, newest: Sequence[Tracked]) -> "Sequence[LargerCrowd]":
        """This crowd with the first of ``newest``, the first two, ...; none of them shares a block.

        Where one of these crowds must be forecast, one computation does for all.
        """
        line = Line(self, newest) if len(newest) > 1 else None
        crowds: list[LargerCrowd] = []
        for place, one in enumerate(newest):
            before = crowds[-1] if crowds else self
            crowds.append(LargerCrowd(before, one, self.shared, line, place))
        return crowds

    def apart(self, requests: Sequence[Tracked]) -> "Crowd":
        """Other requests alone, who share no blocks; beliefs about lengths are those of this crowd."""
        tokens = np.array([one.expected for one in requests], dtype=np.int64)
        predicted = [one.predicted for one in requests]
        return self._some(Members.of(requests, None), tokens, lambda: np.array(predicted, dtype=np.int64))

    def without(self, row: int) -> "Crowd":
        """This crowd when the request in column ``row`` has left; beliefs about lengths stay."""
        members, tokens = self.members.without(row), np.delete(self.tokens, row)
        return self._some(members, tokens, lambda: np.delete(self.predicted, row))

    def only(self, rows: npt.NDArray[np.bool_]) -> "Crowd":
        """The crowd of the requests in ``rows`` alone, who share no blocks; beliefs about lengths stay."""
        members = Members(self.members.table[:, rows], None)
        return self._some(members, self.tokens[rows], lambda: self.predicted[rows])

    def _some(self, members: Members, tokens: IntArray, predicted: Callable[[], IntArray]) -> "Crowd":
        return Crowd(
            self.layout,
            self.block_size,
            len(tokens),
            members.shared,
            lambda: members,
            lambda: tokens,
            predicted,
            lambda _: self.lengths,
        )

    def __len__(self) -> int:
        """Number of requests."""
        return self._count

    @cached_property
    def members(self) -> Members:
        """The columns that do not change."""
        return self._members()

    @cached_property
    def tokens(self) -> IntArray:
        """Known tokens of each, those being sampled included."""
        return self._tokens()

    @cached_property
    def generated(self) -> IntArray:
        """Output tokens among them."""
        return self.tokens - self.members.prompts

    @cached_property
    def predicted(self) -> IntArray:
        """Output tokens that a length predictor believes of each."""
        return self._predicted()

    @cached_property
    def lengths(self) -> LengthDistribution:
        """What is believed about output lengths in this snapshot."""
        return self._lengths(self)

    @cached_property
    def demand(self) -> Demand:
        """The memory that these requests hold once all their known tokens are computed."""
        return Demand(
            tokens=self.tokens,
            block_size=self.block_size,
            blocks_per_merged=self.layout.blocks_per_merged,
            units_per_block=self.layout.units_per_block,
            shared=self.shared,
        )

    @cached_property
    def own_blocks(self) -> int:
        """Blocks for all known tokens if nobody shared any."""
        return _sum_blocks(self.tokens, self.block_size)

    @cached_property
    def most_own_blocks(self) -> int:
        """The same if every output is as long as it may be, and none leaves before another."""
        return _sum_blocks(self.tokens + self.remaining(self.members.ceilings), self.block_size)

    @property
    def footprint(self) -> int:
        """Merged blocks for all known tokens."""
        return self.merged(self.own_blocks - self._surplus)

    @property
    def most(self) -> int:
        """Merged blocks if every output is as long as it may be, and none leaves before another."""
        return self.merged(self.most_own_blocks - self._surplus)

    @cached_property
    def _surplus(self) -> int:
        return 0 if self.shared is None else self.shared.surplus

    def merged(self, blocks: int) -> int:
        """Merged blocks that so many blocks take."""
        return -(-blocks // self.layout.blocks_per_merged) * self.layout.units_per_block

    def remaining(self, lengths: IntArray) -> IntArray:
        """Tokens still to be stored, for believed output lengths [draws, n].

        One less than will be generated: the last token of an output is never computed, so that a request
        ends with prompt + output - 1 tokens of KV.
        """
        left: IntArray = lengths - (self.generated + 1)
        np.maximum(left, 0, out=left)
        return left

    def left_of(self, one: Tracked, belief: Belief) -> list[int]:
        """Tokens that a further request would have to store [draws]."""
        stored = one.generated + 1
        return [max(length - stored, 0) for length in belief.length_of(one, self)]

    def peak(self, belief: Belief) -> Sequence[int]:
        """M* in blocks [draws] if outputs are as long as believed."""
        steps, most = self.timeline(belief).top()
        if belief.lasting:
            self.peaks.note(belief, steps)
        blocks: list[int] = most.tolist()
        self._bounds[belief] = Bounds(blocks, blocks)
        return blocks

    def glimpse(self, belief: Belief) -> Sequence[int] | None:
        """Blocks held [draws] when an earlier forecast saw the most: at most M*, and often hardly less.

        It costs a fraction of a forecast. None where there was none, where what is believed does not last, or
        where ``bounds`` say more already.
        """
        if belief in self._bounds:
            return self._bounds[belief].low
        if not belief.lasting or self._is_forecast(belief):
            return None
        steps = self.peaks.steps(belief)
        return None if steps is None else self._held_after(belief, steps)

    def _is_forecast(self, belief: Belief) -> bool:
        return belief in self._timelines

    def _held_after(self, belief: Belief, steps: IntArray) -> list[int]:
        """Blocks held after so many steps [draws], by all that end then or later."""
        blocks: list[int] = self.demand.held_after(self.left(belief), steps).tolist()
        return blocks

    def left(self, belief: Belief) -> IntArray:
        """Tokens still to be stored, if outputs are as long as believed [draws, n]."""
        left = self._left.get(belief)
        if left is None:
            left = self._left[belief] = self.remaining(belief.lengths(self))
        return left

    def bounds(self, belief: Belief) -> Bounds:
        """Between which numbers of blocks M* lies [draws], if outputs are as long as believed.

        Exact unless this is a crowd with one more request; then it costs far less than ``peak``.
        """
        if belief not in self._bounds:
            self.peak(belief)
        return self._bounds[belief]

    def known_peak(self, belief: Belief) -> Sequence[int] | None:
        """M* [draws], where it is at hand."""
        bounds = self._bounds.get(belief)
        return None if bounds is None or bounds.low is not bounds.high else bounds.low

    def timeline(self, belief: Belief) -> Timeline:
        """When these requests end, and what is held then."""
        timeline = self._timelines.get(belief)
        if timeline is None:
            timeline = self._timelines[belief] = self._forecast(belief)
        return timeline

    def _forecast(self, belief: Belief) -> Timeline:
        return self.demand.timeline(self.left(belief))


class LargerCrowd(Crowd):
    """A crowd and one more request, the newest.

    What can be had by adding the newest's share to the crowd before it is not counted anew; columns are
    written out only for a forecast that needs them.

    line, place: where the newest stands among others that are forecast together.
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


def _sum_blocks(tokens: IntArray, size: int) -> int:
    """Blocks for so many tokens of each."""
    return int(blocks_in(tokens + (size - 1), size).sum())
