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
from shoal.schedule.members import IntArray, Members
from shoal.schedule.tracked import Tracked


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


def _sum_blocks(tokens: IntArray, size: int) -> int:
    """Blocks for so many tokens of each."""
    return int(blocks_in(tokens + (size - 1), size).sum())
