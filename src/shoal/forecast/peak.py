"""The most memory that a batch of requests will hold at once, M*.

Past-Future scheduler (Gong et al., section 3.3, equations 2-4): requests that advance together, one token per
step, hold most at a moment when one of them finishes. Sorted by remaining tokens, longest first,
M_i = sum of a_j over j <= i, plus i * b_i, with a the tokens held and b those remaining; M* = max M_i.
Here tokens are rounded up to blocks, request by request, and shared blocks count once.

The peak of several services is the sum of each one's own: services whose steps alternate do not advance
together, so one may be at its peak while another waits at its own. The formula over all of their requests
together would promise too little memory.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shoal.forecast.running_blocks import blocks_in, running_blocks

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Blocks that several requests of a batch hold, in sets of blocks with the same holders."""

    counts: IntArray
    """Number of blocks in each set [sets]."""
    members: IntArray
    """Indices of the requests that hold set 0, then of those that hold set 1, ..."""
    starts: IntArray
    """Where each set begins in ``members`` [sets]."""

    def without(self, member: int) -> "SharedBlocks":
        """The shared blocks after request ``member`` has left; indices after it fall by one."""
        sizes = np.diff(np.append(self.starts, len(self.members)))
        sets = np.repeat(np.arange(len(self.counts)), sizes)
        keep = self.members != member
        members, sets = self.members[keep], sets[keep]
        kept, starts = np.unique(sets, return_index=True)
        return SharedBlocks(self.counts[kept], members - (members > member), starts)

    def held(self, requests: int) -> IntArray:
        """How many shared blocks each of ``requests`` requests holds."""
        sizes = np.diff(np.append(self.starts, len(self.members)))
        return np.bincount(self.members, weights=np.repeat(self.counts, sizes), minlength=requests).astype(
            np.int64
        )

    @property
    def surplus(self) -> int:
        """How many blocks too many are counted if each request counts all of its blocks."""
        sizes = np.diff(np.append(self.starts, len(self.members)))
        return int((self.counts * (sizes - 1)).sum())


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that one service's requests hold now, and how it is counted."""

    tokens: IntArray
    """Tokens of each request, at least 1 [n]."""
    block_size: int
    """Tokens in a block."""
    blocks_per_merged: int = 1
    """Blocks of the service in one merged block, as in its layout."""
    units_per_block: int = 1
    """Units of the pool that a block takes, as in its layout."""
    shared: SharedBlocks | None = None
    """Blocks that several of the requests hold."""

    def merged(self, blocks: IntArray) -> IntArray:
        """Number of merged blocks for so many blocks."""
        return -(-blocks // self.blocks_per_merged) * self.units_per_block

    def total(self, tokens: IntArray) -> int:
        """Merged blocks if each request has so many ``tokens`` [n], at least as many as now."""
        blocks = int((-(-tokens // self.block_size)).sum())
        if self.shared is not None:
            blocks -= self.shared.surplus
        return -(-blocks // self.blocks_per_merged) * self.units_per_block

    def timeline(self, remaining: IntArray) -> "Timeline":
        """The blocks held when each request finishes, if all advance together by ``remaining`` [draws, n]."""
        order, ends = _longest_first(remaining)
        held = running_blocks(self.tokens, order, ends, self.block_size)
        if self.shared is not None and len(self.shared.counts):
            held += np.cumsum(_shared_with_longest(self.shared, order), axis=1)
        return Timeline(self, self.tokens, remaining, ends, held)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The moments at which a service's requests finish, for each draw of their output lengths."""

    demand: Demand
    """How memory is counted, and what the first requests share."""
    tokens: IntArray
    """Tokens of each request now [n]."""
    remaining: IntArray
    """Tokens that each will still get [draws, n]."""
    ends: IntArray
    """The steps after which requests finish: ``remaining``, in any order within a draw [draws, n]."""
    held: IntArray
    """Blocks held at each of ``ends`` by the requests that finish then or later [draws, n]."""

    def peak(self) -> IntArray:
        """M* in merged blocks [draws]."""
        return self.demand.merged(self.held.max(axis=1, initial=0))

    def peak_with_each(self, tokens: IntArray, remaining: IntArray) -> IntArray:
        """M* with the first, the first two, ... candidates, which share no blocks [k, draws].

        tokens: of each candidate now [k]. remaining: tokens that each will still get [draws, k]. It needs no
        sorting and so costs a fraction of new timelines.
        """
        size = self.demand.block_size
        ends = np.concatenate((self.ends, remaining), axis=1)
        # [k, draws, n + k]. Moments at which a candidate finishes that has not joined yet do no harm.
        last = remaining.T[:, :, None]
        held = blocks_in(ends + (tokens + (size - 1))[:, None, None], size)
        held *= ends <= last
        running = _held_after(self.demand, self.tokens, self.remaining, last).T
        held[0] += np.concatenate((self.held, running), axis=1)
        for before, after in pairwise(held):  # many times as fast as a cumulative sum along this axis
            after += before
        return self.demand.merged(held.max(axis=2))


def _held_after(demand: Demand, tokens: IntArray, remaining: IntArray, steps: IntArray) -> IntArray:
    """Blocks held after ``steps`` [..., draws, 1] by the requests that finish then or later [..., draws]."""
    shared, size = demand.shared, demand.block_size
    present = remaining >= steps
    blocks = blocks_in((tokens + (size - 1)) + steps, size)
    blocks *= present
    held: IntArray = blocks.sum(axis=-1)
    if shared is not None and len(shared.counts):
        holders = np.add.reduceat(present[..., shared.members].astype(np.int64), shared.starts, axis=-1)
        held -= (shared.counts * np.maximum(holders - 1, 0)).sum(axis=-1)
    return held


def _longest_first(remaining: IntArray) -> tuple[IntArray, IntArray]:
    """Indices of the requests by falling ``remaining``, and ``remaining`` in that order; both [draws, n]."""
    # One sort of numbers that hold both takes less time than ``argsort`` and ``take_along_axis``.
    bits = remaining.shape[1].bit_length()
    keys = remaining << bits
    keys |= np.arange(remaining.shape[1])
    keys.sort(axis=1)
    falling = keys[:, ::-1]
    return falling & ((1 << bits) - 1), falling >> bits


def _shared_with_longest(shared: SharedBlocks, order: IntArray) -> IntArray:
    """Correction [draws, n] to each request's blocks, so that only the longest holder counts shared ones."""
    draws, requests = order.shape
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(requests)[None, :], axis=1)
    longest = np.minimum.reduceat(rank[:, shared.members], shared.starts, axis=1)
    correction = -shared.held(requests)[order]
    np.add.at(correction, (np.arange(draws)[:, None], longest), shared.counts)
    return correction
