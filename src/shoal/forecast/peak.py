"""The future: the most memory that a group of requests will hold at once.

Past-Future scheduler (Gong et al., section 3.3, equations 2-4): requests that advance together, one token a
step, hold most at a moment when one of them finishes. Sorted by remaining tokens, longest first,
M_i = sum of a_j over j <= i, plus i * b_i, with a the tokens held and b those remaining; M* = max M_i.
Here tokens are rounded up to blocks, request by request, and blocks that several share count once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Blocks that several requests of one group hold together, in sets with the same holders.

    counts: blocks in each set. members: indices of the requests that hold set 0, then set 1, and so on.
    starts: where each set begins in ``members``.
    """

    counts: IntArray
    members: IntArray
    starts: IntArray

    def without(self, member: int) -> "SharedBlocks":
        """The same when request ``member`` has left; those after it move up."""
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
        """How many blocks are counted too often if every request counts all of its own."""
        sizes = np.diff(np.append(self.starts, len(self.members)))
        return int((self.counts * (sizes - 1)).sum())


@dataclass(frozen=True, slots=True)
class Demand:
    """What one service's requests hold and will hold.

    tokens: tokens of each request now, at least 1 [n]. block_size: tokens per block.
    blocks_per_merged, units_per_block: as in the service's layout; memory is counted in merged blocks.
    """

    tokens: IntArray
    block_size: int
    blocks_per_merged: int = 1
    units_per_block: int = 1
    shared: SharedBlocks | None = None

    def merged(self, blocks: IntArray) -> IntArray:
        """Merged blocks that so many blocks take."""
        return -(-blocks // self.blocks_per_merged) * self.units_per_block

    def total(self, remaining: IntArray) -> IntArray:
        """Merged blocks [draws] when each has ``remaining`` [draws, n] tokens more and none has left."""
        blocks = (-(-(self.tokens + remaining) // self.block_size)).sum(axis=-1)
        if self.shared is not None:
            blocks = blocks - self.shared.surplus
        return self.merged(blocks)

    def peak(self, remaining: IntArray) -> IntArray:
        """M* in merged blocks [draws], for ``remaining`` tokens [draws, n], all advancing together."""
        if remaining.shape[1] == 0:
            return np.zeros(len(remaining), dtype=np.int64)
        order = _longest_first(remaining)
        left = np.take_along_axis(remaining, order, axis=1)
        whole, part = np.divmod(self.tokens - 1, self.block_size)
        blocks = (whole + 1)[order]
        if self.shared is not None and len(self.shared.counts):
            blocks += _shared_with_longest(self.shared, order)
        blocks = np.cumsum(blocks, axis=1)
        blocks += np.arange(1, blocks.shape[1] + 1) * (left // self.block_size)
        if self.block_size > 1:
            blocks += _carries(part[order], left % self.block_size, self.block_size)
        return self.merged(blocks.max(axis=1))


def safe_peak(peaks: Sequence[IntArray]) -> IntArray:
    """M* of several services together [draws]: the sum of each one's own peak, all in merged blocks.

    Services whose steps alternate do not advance together, so that one may be at its peak while another
    waits at its own; the lockstep formula over all of their requests would promise too much.
    """
    together: IntArray = np.sum(peaks, axis=0)
    return together


def _longest_first(remaining: IntArray) -> IntArray:
    """Stable order [draws, n] of falling ``remaining``; 16-bit keys make NumPy sort by radix."""
    keys = remaining.max() - remaining
    if keys.max() < 2**16:
        return np.argsort(keys.astype(np.uint16), axis=1, kind="stable")
    return np.argsort(keys, axis=1, kind="stable")


def _carries(parts: IntArray, steps: IntArray, block_size: int) -> IntArray:
    """How many j <= i have parts[j] + steps[i] >= block_size, both below it [draws, n].

    A running count for every threshold, of which each i then picks the one that its steps ask for.
    """
    draws, requests = parts.shape
    # In 32 bits NumPy accumulates several times as fast as in 16 or 64. Arrays of 128 KiB and more would
    # come from the system and go back to it at every call, which costs more than the counting.
    together = max(1, 30_000 // (block_size * requests))
    thresholds = np.arange(block_size, 0, -1, dtype=np.int32)[:, None]
    carries = np.empty_like(steps)
    for first in range(0, draws, together):
        some = slice(first, first + together)
        reached = parts[some].astype(np.int32)[:, None, :] >= thresholds
        counts = np.cumsum(reached, axis=2, dtype=np.int32)
        carries[some] = np.take_along_axis(counts, steps[some, None, :], axis=1)[:, 0]
    return carries


def _shared_with_longest(shared: SharedBlocks, order: IntArray) -> IntArray:
    """Correction [draws, n] of each request's blocks so that shared ones count with the longest only."""
    draws, requests = order.shape
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(requests)[None, :], axis=1)
    longest = np.minimum.reduceat(rank[:, shared.members], shared.starts, axis=1)
    correction = -shared.held(requests)[order]
    np.add.at(correction, (np.arange(draws)[:, None], longest), shared.counts)
    return correction
