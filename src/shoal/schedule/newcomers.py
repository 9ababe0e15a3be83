"""Letting waiting requests in: what the prefix index or the host has of them, and whether the rest fits."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from shoal.core import BlockCopy, Joined, SyntheticPrompt
from shoal.kvcache import BlockPool
from shoal.schedule.admission import Admission
from shoal.schedule.compose import slice_blocks, slice_end
from shoal.schedule.crowd import Crowd
from shoal.schedule.group import Group
from shoal.schedule.larger_crowd import LargerCrowd, plus_each
from shoal.schedule.tracked import Tracked

AHEAD = (1, 2, 12)
"""So many newcomers are forecast together when none, one, or more were let in."""


class Refusal(Enum):
    """Why a request was not let in: it waits for an event, for memory, or for memory in one piece.

    FRAGMENTED: there is memory, but no merged block is free for it; a compaction helps.
    """

    WAITS = auto()
    MEMORY = auto()
    FRAGMENTED = auto()


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A waiting request that joins the next plan; its blocks are allocated.

    chunk: tokens it computes there. copies: swapped blocks that come back, or the copy-on-write of its last
    block where every known token was found; a copy's device source stays referenced until the plan's update.
    """

    request: Tracked
    chunk: int
    copies: Sequence[BlockCopy]

    def joined(self) -> Joined:
        """The delta for the executor; a synthetic prompt has no ids, so counting numbers stand for them."""
        one = self.request
        assert one.sequence is not None
        synthetic = isinstance(one.request.prompt, SyntheticPrompt)
        return Joined(
            sequence=one.sequence,
            tokens=range(one.known) if synthetic else tuple(one.tokens),
            prompt_tokens=one.prompt_tokens,
            computed=one.computed,
            blocks=tuple(one.blocks),
            sampling=one.request.sampling,
            seed=one.request.seed,
        )


class Door:
    """Admits requests of one service to one plan, one after another.

    groups: of all services. claimed: blocks that the service's running requests need in the same plan; a
    newcomer takes none of those, and evicts nobody. ends: how many requests of the engine have ended.
    needed: blocks that the last one examined would have taken, with those claimed. refused: who was turned
    away, and why.
    """

    def __init__(
        self,
        pool: BlockPool,
        admission: Admission,
        service: str,
        groups: Mapping[str, Group],
        claimed: int,
        ends: int,
    ) -> None:
        self.joined: list[Newcomer] = []
        self.needed = 0
        self.refused: tuple[Tracked, Refusal] | None = None
        self._pool = pool
        self._admission = admission
        self._group = groups[service]
        self._groups = groups
        self._claimed = claimed
        self._ends = ends
        # Nobody looks at what requests hold before there are blocks for the first of those who wait.
        self._crowd: Crowd | None = None
        # Who comes next, and the crowds if the first, the first two, ... of them are let in.
        self._coming: deque[Tracked] = deque()
        self._ahead: deque[LargerCrowd] = deque()
        self._next_slices: dict[str, int] | None = None

    def announced(self, waiting: Iterable[Tracked]) -> Iterator[Tracked]:
        """``waiting`` one by one, to be admitted or not; some are known here before it is their turn."""
        rest = iter(waiting)
        # Most steps let in nobody; where several were let in already, more are likely to be.
        while some := deque(islice(rest, AHEAD[min(len(self.joined), 2)])):
            self._coming = some
            while some:
                yield some.popleft()

    def admit(self, one: Tracked, budget: int, *, always: bool) -> int | Refusal:
        """Let ``one`` in if memory allows; returns how many of ``budget`` tokens it computes, or why not.

        always: whatever the admission says. All known tokens must find room at once, also where the budget
        makes this plan compute a part of them, so that half a prompt is not let in to be evicted.
        """
        pool, service, size = self._pool, one.service, self._pool.block_size
        slice_tokens = self._admission.slice_tokens
        if slice_tokens is not None and one.blocked_until > self._ends and not always:
            return Refusal.WAITS
        hits = self._find(one)
        # One token must be left to compute. If all blocks were found, a copy of the last is written again.
        rewrite = len(hits) * size == one.known
        kept = hits[:-1] if rewrite else hits
        whole = -(-one.known // size) if slice_tokens is None else slice_blocks(one, slice_tokens, size)
        if rewrite and not pool.can_allocate(service, self._claimed + whole - len(kept)):
            # No room for that block beside its copy: its tokens are computed again.
            pool.free(service, hits[-1:])
            hits, rewrite = kept, False
        refusal = self._judge(one, kept, whole - len(kept), always=always)
        if refusal is not None:
            # The blocks found will be cached again, so that a compaction may take them.
            self.needed += len(hits)
            pool.free(service, hits)
            return refusal
        one.computed = one.known - 1 if rewrite else max(len(hits) * size, one.saved_tokens)
        one.scheduled = one.computed
        chunk = min(budget, one.known - one.computed)
        if slice_tokens is None:
            whole = -(-(one.computed + chunk) // size)
            one.slice_end = one.last_token
        else:
            one.slice_end = slice_end(one, slice_tokens)
        fresh = pool.allocate(service, whole - len(kept))
        assert fresh is not None
        one.blocks = kept + fresh
        if self._next_slices is not None and slice_tokens is not None:
            smallest = _smallest_next_slice((one,), slice_tokens, size)
            self._next_slices[service] = min(smallest, self._next_slices.get(service, smallest))
        one.published, one.shareable = len(hits), len(kept)
        self._group.shared.hold(kept)
        if rewrite:
            copies: Sequence[BlockCopy] = (BlockCopy(service, hits[-1], fresh[0]),)
        else:
            at = range(len(kept), len(one.saved))
            copies = [BlockCopy(service, one.saved[i], one.blocks[i], source_host=True) for i in at]
        self.joined.append(Newcomer(one, chunk, copies))
        return chunk

    def _find(self, one: Tracked) -> list[int]:
        """Blocks of its leading tokens that are at hand, now with a reference each."""
        if not self._pool.prefix_caching:
            return []
        one.hash_known(self._pool.block_size, one.known // self._pool.block_size)
        return self._pool.match_prefix(one.service, one.hashes)

    def _judge(self, one: Tracked, kept: Sequence[int], needed: int, *, always: bool) -> Refusal | None:
        """Whether ``needed`` blocks are there for it, and the admission agrees (or ``always``)."""
        pool, service = self._pool, one.service
        self.needed = self._claimed + needed
        fragmented = not pool.can_allocate(service, self.needed)
        if fragmented and (self.joined or not pool.can_compact(service, self.needed)):
            return Refusal.MEMORY
        crowd = self._crowd_with(one, kept)
        if not always:
            others = [
                group.crowd() for group in self._groups.values() if group is not self._group and group.running
            ]
            if not self._admission.fits([crowd, *others], pool.capacity):
                return Refusal.MEMORY
            if self._admission.slice_tokens is not None and not self._somebody_goes_on(one):
                return Refusal.MEMORY
        if fragmented:
            return Refusal.FRAGMENTED
        self._crowd = crowd
        return None

    def _somebody_goes_on(self, one: Tracked) -> bool:
        """Whether, with ``one`` let in, some holder of KV could get its next slice."""
        size, slice_tokens = self._pool.block_size, self._admission.slice_tokens
        assert slice_tokens is not None
        first = slice_blocks(one, slice_tokens, size)
        own = -(-min(slice_end(one, slice_tokens) + slice_tokens, one.last_token) // size) - first
        # Mostly ``one`` could itself, and nobody need look at all the others.
        if self._could_grow(one.service, own):
            return True
        if self._next_slices is None:
            self._next_slices = self._smallest_next_slices(slice_tokens)
        return any(self._could_grow(service, blocks) for service, blocks in self._next_slices.items())

    def _smallest_next_slices(self, slice_tokens: int) -> dict[str, int]:
        """By service: the fewest blocks that one of its holders needs for the slice after this one."""
        size = self._pool.block_size
        holders = {name: list(group.running) for name, group in self._groups.items()}
        holders[self._group.service] += [newcomer.request for newcomer in self.joined]
        return {
            name: _smallest_next_slice(some, slice_tokens, size) for name, some in holders.items() if some
        }

    def _could_grow(self, service: str, blocks: int) -> bool:
        if service == self._group.service:
            return self._pool.can_allocate(service, self.needed + blocks)
        taken, view = self._pool.merged_demand(self._group.service, self.needed), self._groups[service].layout
        also = -(-taken * view.blocks_per_merged // view.units_per_block)
        return blocks == 0 or self._pool.can_allocate(service, blocks + also)

    def _crowd_with(self, one: Tracked, kept: Sequence[int]) -> Crowd:
        """Those running, those let in so far, and ``one`` beginning with the blocks ``kept``."""
        crowd = self._group.crowd() if self._crowd is None else self._crowd
        if kept:
            return self._group.crowd_with(crowd, [other.request for other in self.joined], one, kept)
        if not (self._ahead and self._ahead[0].adds(one, crowd)):
            self._ahead = deque(plus_each(crowd, (one, *self._coming)))
        return self._ahead.popleft()


def _smallest_next_slice(holders: Iterable[Tracked], slice_tokens: int, block_size: int) -> int:
    """The fewest blocks that one of ``holders`` (never none) needs for the slice after this one."""
    smallest = sys.maxsize
    for one in holders:
        end = one.slice_end if one.slice_end > one.expected else one.expected
        tokens = end + slice_tokens if end + slice_tokens < one.last_token else one.last_token
        blocks = -(-tokens // block_size) - len(one.blocks)
        if blocks <= 0:
            return 0
        if blocks < smallest:
            smallest = blocks
    return smallest
