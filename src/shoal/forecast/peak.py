"""Peak memory: the maximum KV blocks that a batch will hold at once, M*.

Past-Future scheduler (Gong et al., section 3.3, equations 2-4): the memory of requests that advance by one
token per step has its maximum when one of them finishes. Sorted by remaining tokens, longest first, M_i = sum
of a_j over j <= i, plus i * b_i, with a the tokens held and b those remaining; M* = max M_i. Here tokens are
rounded up to blocks for each request, and shared blocks count once.

The peak of several services is the sum of their peaks: their steps alternate, so one may be at its peak while
another waits at its own. The formula over the requests of all services would be too low.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shoal.forecast.running_blocks import blocks_in, running_blocks

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Blocks shared by several requests of a batch, as sets of blocks with the same holders."""

    counts: IntArray
    """Number of blocks in each set [sets]."""
    members: IntArray
    """Indices of the requests that hold set 0, then of those that hold set 1, ..."""
    starts: IntArray
    """Start of each set in ``members`` [sets]."""

    def without(self, member: int) -> "SharedBlocks":
        """The shared blocks without request ``member``; indices after it decrease by one."""
        sizes = np.diff(np.append(self.starts, len(self.members)))
        sets = np.repeat(np.arange(len(self.counts)), sizes)
        keep = self.members != member
        members, sets = self.members[keep], sets[keep]
        kept, starts = np.unique(sets, return_index=True)
        return SharedBlocks(self.counts[kept], members - (members > member), starts)

    def held(self, requests: int) -> IntArray:
        """Number of shared blocks of each of ``requests`` requests."""
        sizes = np.diff(np.append(self.starts, len(self.members)))
        return np.bincount(self.members, weights=np.repeat(self.counts, sizes), minlength=requests).astype(
            np.int64
        )

    @property
    def surplus(self) -> int:
        """Excess of blocks if each request counts all of its blocks."""
        sizes = np.diff(np.append(self.starts, len(self.members)))
        return int((self.counts * (sizes - 1)).sum())


@dataclass(frozen=True, slots=True)
class Demand:
    """The current memory of one service's requests, and its layout."""

    tokens: IntArray
    """Tokens of each request, at least 1 [n]."""
    block_size: int
    """Tokens per block."""
    blocks_per_merged: int = 1
    """Blocks of the service per merged block."""
    units_per_block: int = 1
    """Units of the pool per block."""
    shared: SharedBlocks | None = None

    def merged(self, blocks: IntArray) -> IntArray:
        return -(-blocks // self.blocks_per_merged) * self.units_per_block

    def total(self, tokens: IntArray) -> int:
        """Merged blocks if the requests have ``tokens`` [n], at least as many as now."""
        blocks = int((-(-tokens // self.block_size)).sum())
        if self.shared is not None:
            blocks -= self.shared.surplus
        return -(-blocks // self.blocks_per_merged) * self.units_per_block

    def timeline(self, remaining: IntArray) -> "Timeline":
        """Blocks held when each request finishes; remaining: tokens to come [draws, n]."""
        order, ends = _longest_first(remaining)
        held = running_blocks(self.tokens, order, ends, self.block_size)
        if self.shared is not None and len(self.shared.counts):
            held += np.cumsum(_shared_with_longest(self.shared, order), axis=1)
        return Timeline(self, self.tokens, remaining, ends, held)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Blocks held when each of a service's requests finishes, for each draw of their output lengths."""

    demand: Demand
    tokens: IntArray
    """Current tokens of each request [n]."""
    remaining: IntArray
    """Tokens to come of each request [draws, n]."""
    ends: IntArray
    """Steps after which requests finish: ``remaining``, in any order within a draw [draws, n]."""
    held: IntArray
    """Blocks held at each of ``ends`` by the requests that finish then or later [draws, n]."""

    def peak(self) -> IntArray:
        """M* in merged blocks [draws]."""
        return self.demand.merged(self.held.max(axis=1, initial=0))

    def peak_with_each(self, tokens: IntArray, remaining: IntArray) -> IntArray:
        """M* with the first, the first two, ... candidates, which share no blocks [k, draws].

        tokens: current tokens of each candidate [k]. remaining: tokens to come of each [draws, k]. Needs no
        sorting, so it is much faster than new timelines.
        """
        size = self.demand.block_size
        ends = np.concatenate((self.ends, remaining), axis=1)
        # [k, draws, n + k]. Ends of candidates that have not joined yet do not change the maximum.
        last = remaining.T[:, :, None]
        held = blocks_in(ends + (tokens + (size - 1))[:, None, None], size)
        held *= ends <= last
        running = _held_after(self.demand, self.tokens, self.remaining, last).T
        held[0] += np.concatenate((self.held, running), axis=1)
        for before, after in pairwise(held):  # much faster than a cumulative sum along this axis
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
    """Indices of requests by descending ``remaining``, and ``remaining`` in that order; both [draws, n]."""
    # Sorting numbers that encode both is faster than ``argsort`` and ``take_along_axis``.
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
