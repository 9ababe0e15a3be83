"""What an admission looks at: the requests that hold memory, as columns of numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shoal.forecast import Demand, LengthDistribution, LengthHistory, SharedBlocks, Timeline
from shoal.kvcache import ServiceLayout
from shoal.schedule.tracked import Tracked

IntArray = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.uint64)


@dataclass(frozen=True)
class Members:
    """What does not change while the same requests run: one column each, in one order.

    prompts: prompt tokens. ceilings: most output tokens. seeds: keys of forecasts. truths: output tokens
    where known beforehand, otherwise the ceiling. shared: blocks that several of them hold.
    """

    prompts: IntArray
    ceilings: IntArray
    seeds: npt.NDArray[np.uint64]
    truths: IntArray
    shared: SharedBlocks | None

    @classmethod
    def of(cls, requests: Sequence[Tracked], shared: SharedBlocks | None) -> "Members":
        """The columns of ``requests``."""
        return cls(
            prompts=np.array([one.prompt_tokens for one in requests], dtype=np.int64),
            ceilings=np.array([one.ceiling for one in requests], dtype=np.int64),
            seeds=np.array([one.seed for one in requests], dtype=np.uint64),
            truths=np.array([one.last_token - one.prompt_tokens for one in requests], dtype=np.int64),
            shared=shared,
        )

    def plus(self, request: Tracked, shared: SharedBlocks | None) -> "Members":
        """These and one more."""
        return Members(
            prompts=_append(self.prompts, request.prompt_tokens),
            ceilings=_append(self.ceilings, request.ceiling),
            seeds=_append(self.seeds, request.seed),
            truths=_append(self.truths, request.last_token - request.prompt_tokens),
            shared=shared,
        )

    def last(self) -> "Members":
        """The last of these alone."""
        return Members(self.prompts[-1:], self.ceilings[-1:], self.seeds[-1:], self.truths[-1:], shared=None)

    def only(self, rows: npt.NDArray[np.bool_]) -> "Members":
        """Those of ``rows``, where nobody shares blocks."""
        return Members(self.prompts[rows], self.ceilings[rows], self.seeds[rows], self.truths[rows], None)

    def without(self, row: int) -> "Members":
        """These without one."""
        return Members(
            prompts=np.delete(self.prompts, row),
            ceilings=np.delete(self.ceilings, row),
            seeds=np.delete(self.seeds, row),
            truths=np.delete(self.truths, row),
            shared=None if self.shared is None else self.shared.without(row),
        )


def _append(column: npt.NDArray[Number], value: int) -> npt.NDArray[Number]:
    """``np.append`` of one value, several times as fast."""
    longer = np.empty(len(column) + 1, dtype=column.dtype)
    longer[:-1] = column
    longer[-1] = value
    return longer


@dataclass(frozen=True)
class Crowd:
    """An immutable snapshot of one service's requests that hold memory, or would if one more is admitted.

    generated: output tokens of each, those being sampled included. predicted: output tokens that a length
    predictor believes of each. lengths: what the service's history says
    about output lengths; a function, so that nobody pays for it who does not ask. before: the crowd that
    this is with one more request, which shares no block with it.
    """

    layout: ServiceLayout
    block_size: int
    members: Members
    generated: IntArray
    predicted: IntArray
    history: Callable[[], LengthDistribution]
    before: "Crowd | None" = None
    _timelines: dict[object, Timeline] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        layout: ServiceLayout,
        block_size: int,
        members: Members,
        requests: Sequence[Tracked],
        history: LengthHistory,
    ) -> "Crowd":
        """A snapshot of ``requests``, whose columns are ``members``."""
        expected = np.array([one.expected for one in requests], dtype=np.int64)
        generated = expected - members.prompts
        predicted = np.array([one.predicted for one in requests], dtype=np.int64)
        return cls(layout, block_size, members, generated, predicted, lambda: history.distribution(generated))

    def plus(self, request: Tracked, shared: SharedBlocks | None) -> "Crowd":
        """This crowd and one more request; beliefs about lengths stay those of this crowd."""
        return replace(
            self,
            members=self.members.plus(request, shared),
            generated=_append(self.generated, request.generated),
            predicted=_append(self.predicted, request.predicted),
            history=lambda: self.lengths,
            before=self if shared is self.members.shared else None,
            _timelines={},
        )

    def without(self, row: int) -> "Crowd":
        """This crowd when the request in column ``row`` has left; beliefs about lengths stay."""
        return replace(
            self,
            members=self.members.without(row),
            generated=np.delete(self.generated, row),
            predicted=np.delete(self.predicted, row),
            history=lambda: self.lengths,
            before=None,
            _timelines={},
        )

    def only(self, rows: npt.NDArray[np.bool_]) -> "Crowd":
        """The crowd of the requests in ``rows`` alone, who share no blocks; beliefs about lengths stay."""
        return replace(
            self,
            members=self.members.only(rows),
            generated=self.generated[rows],
            predicted=self.predicted[rows],
            history=lambda: self.lengths,
            before=None,
            _timelines={},
        )

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.generated)

    @cached_property
    def lengths(self) -> LengthDistribution:
        """What is believed about output lengths in this snapshot."""
        return self.history()

    @cached_property
    def demand(self) -> Demand:
        """The memory that these requests hold once all their known tokens are computed."""
        return Demand(
            tokens=self.members.prompts + self.generated,
            block_size=self.block_size,
            blocks_per_merged=self.layout.blocks_per_merged,
            units_per_block=self.layout.units_per_block,
            shared=self.members.shared,
        )

    @cached_property
    def footprint(self) -> int:
        """Merged blocks for all known tokens."""
        return self.demand.total(self.demand.tokens)

    @cached_property
    def most(self) -> int:
        """Merged blocks if every output is as long as it may be, and none leaves before another."""
        return self.demand.total(self.demand.tokens + self.remaining(self.members.ceilings))

    def remaining(self, lengths: IntArray) -> IntArray:
        """Tokens still to be stored, for believed output lengths [draws, n].

        One less than will be generated: the last token of an output is never computed, so that a request
        ends with prompt + output - 1 tokens of KV.
        """
        left: IntArray = np.maximum(lengths - self.generated - 1, 0)
        return left

    def peak(self, key: object, predict: Callable[["Crowd"], IntArray]) -> IntArray:
        """M* in merged blocks [draws] if outputs are as long as ``predict(crowd)`` says [draws, n].

        What is predicted for a request must not depend on the others in the crowd; ``key`` stands for it.
        Then one more request costs little where the crowd without it has been forecast already.
        """
        return self._timeline(key, predict).peak()

    def _timeline(self, key: object, predict: Callable[["Crowd"], IntArray]) -> Timeline:
        timeline = self._timelines.get(key)
        if timeline is None:
            known = None if self.before is None else self.before._timelines.get(key)
            if known is None:
                timeline = self.demand.timeline(self.remaining(predict(self)))
            else:
                newest = self._newest
                timeline = known.plus(self.demand, newest.remaining(predict(newest))[:, 0])
            self._timelines[key] = timeline
        return timeline

    @cached_property
    def _newest(self) -> "Crowd":
        """The last request alone; beliefs about lengths stay those of this crowd."""
        return replace(
            self,
            members=self.members.last(),
            generated=self.generated[-1:],
            predicted=self.predicted[-1:],
            history=lambda: self.lengths,
            before=None,
            _timelines={},
        )
