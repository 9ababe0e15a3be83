"""What an admission looks at: the requests that hold memory, as columns of numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shoal.forecast import Demand, LengthDistribution, LengthHistory, SharedBlocks
from shoal.kvcache import ServiceLayout
from shoal.schedule.tracked import Tracked

IntArray = npt.NDArray[np.int64]


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
            prompts=np.append(self.prompts, request.prompt_tokens),
            ceilings=np.append(self.ceilings, request.ceiling),
            seeds=np.append(self.seeds, np.uint64(request.seed)),
            truths=np.append(self.truths, request.last_token - request.prompt_tokens),
            shared=shared,
        )

    def without(self, row: int) -> "Members":
        """These without one."""
        return Members(
            prompts=np.delete(self.prompts, row),
            ceilings=np.delete(self.ceilings, row),
            seeds=np.delete(self.seeds, row),
            truths=np.delete(self.truths, row),
            shared=None if self.shared is None else self.shared.without(row),
        )


@dataclass(frozen=True)
class Crowd:
    """An immutable snapshot of one service's requests that hold memory, or would if one more is admitted.

    generated: output tokens of each, those being sampled included. lengths: what the service's history says
    about output lengths; a function, so that nobody pays for it who does not ask.
    """

    layout: ServiceLayout
    block_size: int
    members: Members
    generated: IntArray
    history: Callable[[], LengthDistribution]
    _memo: dict[object, IntArray] = field(default_factory=dict)

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
        return cls(layout, block_size, members, generated, lambda: history.distribution(generated))

    def plus(self, request: Tracked, shared: SharedBlocks | None) -> "Crowd":
        """This crowd and one more request; beliefs about lengths stay those of this crowd."""
        return replace(
            self,
            members=self.members.plus(request, shared),
            generated=np.append(self.generated, request.generated),
            history=lambda: self.lengths,
            _memo={},
        )

    def without(self, row: int) -> "Crowd":
        """This crowd when the request in column ``row`` has left; beliefs about lengths stay."""
        return replace(
            self,
            members=self.members.without(row),
            generated=np.delete(self.generated, row),
            history=lambda: self.lengths,
            _memo={},
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
        return int(self.demand.total(np.zeros((1, len(self)), dtype=np.int64))[0])

    def remaining(self, lengths: IntArray) -> IntArray:
        """Tokens still to be stored, for believed output lengths [draws, n].

        One less than will be generated: the last token of an output is never computed, so that a request
        ends with prompt + output - 1 tokens of KV.
        """
        left: IntArray = np.maximum(lengths - self.generated - 1, 0)
        return left

    def remember(self, key: object, compute: Callable[["Crowd"], IntArray]) -> IntArray:
        """``compute(self)``, once for each key: a service that did not change is not forecast again."""
        if key not in self._memo:
            self._memo[key] = compute(self)
        return self._memo[key]
