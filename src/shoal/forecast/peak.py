"""The future: the most memory that a group of requests will hold at once.

Past-Future scheduler (Gong et al., section 3.3, equations 2-4): requests that advance together, one token a
step, hold most at a moment when one of them finishes. Sorted by remaining tokens, longest first,
M_i = sum of a_j over j <= i, plus i * b_i, with a the tokens held and b those remaining; M* = max M_i.
Here tokens are rounded up to blocks, request by request, and blocks that several share count once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shoal.forecast.running_blocks import blocks_in, running_blocks

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

    def total(self, tokens: IntArray) -> int:
        """Merged blocks when each has as many ``tokens`` [n], at least its own, and none has left."""
        blocks = int((-(-tokens // self.block_size)).sum())
        if self.shared is not None:
            blocks -= self.shared.surplus
        return -(-blocks // self.blocks_per_merged) * self.units_per_block

    def held_after(self, remaining: IntArray, steps: IntArray) -> IntArray:
        """Blocks held after so many ``steps`` [draws], by all with as many ``remaining`` [draws, n]."""
        return _held_after(self, self.tokens, remaining, steps[:, None])

    def timeline(self, remaining: IntArray) -> "Timeline":
        """What is held when each of them ends, if all advance together by ``remaining`` tokens [draws, n]."""
        order, ends = _longest_first(remaining)
        held = running_blocks(self.tokens, order, ends, self.block_size)
        if self.shared is not None and len(self.shared.counts):
            held += np.cumsum(_shared_with_longest(self.shared, order), axis=1)
        return Timeline(self, self.tokens, remaining, ends, held)

    def peak(self, remaining: IntArray) -> IntArray:
        """M* in merged blocks [draws], for ``remaining`` tokens [draws, n], all advancing together."""
        return self.timeline(remaining).peak()


@dataclass(frozen=True, slots=True)
class Timeline:
    """The moments at which a service's requests end, by draws of their lengths.

    demand: how their memory is counted, and what the first of them share. tokens: of each now [n]. remaining:
    tokens of each still to come [draws, n]. ends: the same, in any order within a draw; held: blocks held at
    that moment, by all that end then or later [draws, n].
    """

    demand: Demand
    tokens: IntArray
    remaining: IntArray
    ends: IntArray
    held: IntArray

    def peak(self) -> IntArray:
        """M* in merged blocks [draws]."""
        return self.demand.merged(self.most_blocks())

    def most_blocks(self) -> IntArray:
        """The most blocks held at once [draws]."""
        return self.top()[1]

    def top(self) -> tuple[IntArray, IntArray]:
        """After how many steps the most blocks are held [draws], and how many that are [draws]."""
        draws, requests = self.held.shape
        if not requests:
            return np.zeros(draws, dtype=np.int64), np.zeros(draws, dtype=np.int64)
        places = self.held.argmax(axis=1)
        places += np.arange(0, draws * requests, requests)
        return self.ends.ravel().take(places), self.held.ravel().take(places)

    def plus(self, tokens: IntArray, remaining: IntArray) -> tuple["Timeline", IntArray]:
        """The timeline with more requests at the end, who share no block, and what each of them makes of M*.

        tokens: of each of them now [k]. remaining: their tokens still to come [draws, k]. The second result
        is the most blocks held at once by these requests and the first, the first two, ... of them
        [k, draws]. Without sorting, it costs a fraction of a new timeline.
        """
        size = self.demand.block_size
        ends = np.concatenate((self.ends, remaining), axis=1)
        # By newcomer first. A moment at which somebody ends who is not there yet is as good as any other.
        last = remaining.T[:, :, None]
        held = blocks_in(ends + (tokens + (size - 1))[:, None, None], size)
        held *= ends <= last
        after = _held_after(self.demand, self.tokens, self.remaining, last).T
        held[0] += np.concatenate((self.held, after), axis=1)
        for before, one in pairwise(held):  # many times as fast as a cumulative sum along this axis
            one += before
        longer = Timeline(
            self.demand,
            np.concatenate((self.tokens, tokens)),
            np.concatenate((self.remaining, remaining), axis=1),
            ends,
            held[-1],
        )
        return longer, held.max(axis=2)


def _held_after(demand: Demand, tokens: IntArray, remaining: IntArray, steps: IntArray) -> IntArray:
    """Blocks held after so many ``steps`` [..., draws, 1], by all that end then or later [..., draws]."""
    shared, size = demand.shared, demand.block_size
    present = remaining >= steps
    blocks = blocks_in((tokens + (size - 1)) + steps, size)
    blocks *= present
    held: IntArray = blocks.sum(axis=-1)
    if shared is not None and len(shared.counts):
        holders = np.add.reduceat(present[..., shared.members].astype(np.int64), shared.starts, axis=-1)
        held -= (shared.counts * np.maximum(holders - 1, 0)).sum(axis=-1)
    return held


def safe_peak(peaks: Sequence[IntArray]) -> IntArray:
    """M* of several services together [draws]: the sum of each one's own peak, all in merged blocks.

    Services whose steps alternate do not advance together, so that one may be at its peak while another
    waits at its own; the lockstep formula over all of their requests would promise too much.
    """
    together = peaks[0]
    for peak in peaks[1:]:
        together = together + peak
    return together


def _longest_first(remaining: IntArray) -> tuple[IntArray, IntArray]:
    """The requests by falling ``remaining``, and that [draws, n]; sorted together with their numbers."""
    bits = remaining.shape[1].bit_length()
    keys = remaining << bits
    keys |= np.arange(remaining.shape[1])
    keys.sort(axis=1)
    falling = keys[:, ::-1]
    return falling & ((1 << bits) - 1), falling >> bits


def _shared_with_longest(shared: SharedBlocks, order: IntArray) -> IntArray:
    """Correction [draws, n] of each request's blocks so that shared ones count with the longest only."""
    draws, requests = order.shape
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(requests)[None, :], axis=1)
    longest = np.minimum.reduceat(rank[:, shared.members], shared.starts, axis=1)
    correction = -shared.held(requests)[order]
    np.add.at(correction, (np.arange(draws)[:, None], longest), shared.counts)
    return correction
