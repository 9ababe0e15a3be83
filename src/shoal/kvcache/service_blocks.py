"""Merged blocks held by one service: free slots, cached blocks, LRU order; consistency check."""

import heapq
from collections import Counter
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, field

from shoal.kvcache.allocator import IntegrityError


@dataclass(slots=True)
class ServiceBlocks:
    """The merged blocks that one service holds, and the state of the blocks in them.

    ``merged`` is the id of a merged block. If a merged block is a single block (``blocks_per_merged`` 1),
    ``evictable`` is the prefix index's own mapping of cached blocks, oldest first, and ``num_cached``,
    ``last_used`` and ``lru_heap`` stay empty.
    """

    blocks_per_merged: int
    num_merged: int = 0
    num_free_slots: int = 0
    """Free blocks in these merged blocks."""
    free_slots: dict[int, list[int]] = field(default_factory=dict)
    """Ids of free blocks by merged block, for merged blocks with at least one."""
    by_num_free: dict[int, dict[int, None]] = field(default_factory=dict)
    """Merged blocks (an ordered set) by their number of free blocks."""
    num_cached: dict[int, int] = field(default_factory=dict)
    """Number of cached blocks by merged block, for merged blocks with at least one."""
    last_used: dict[int, int] = field(default_factory=dict)
    """Tick of the most recently used cached block by merged block."""
    evictable: MutableMapping[int, int] = field(default_factory=dict)
    """Merged blocks without a live block, with their ``last_used``: they may be evicted for other
    services."""
    lru_heap: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (tick, merged) over ``evictable``; some entries are outdated."""

    def add_partly_free(self, merged: int, num_free: int) -> None:
        """Add a merged block with ``num_free`` free blocks to ``by_num_free``."""
        equally_free = self.by_num_free.get(num_free)
        if equally_free is None:
            self.by_num_free[num_free] = {merged: None}
        else:
            equally_free[merged] = None

    def remove_partly_free(self, merged: int, num_free: int) -> None:
        """Remove a merged block with ``num_free`` free blocks from ``by_num_free``."""
        equally_free = self.by_num_free[num_free]
        del equally_free[merged]
        if not equally_free:
            del self.by_num_free[num_free]

    def take_slots(self, merged: int, count: int) -> list[int]:
        """Take ``count`` free blocks of one merged block, which has at least as many and stays in use."""
        free_slots = self.free_slots[merged]
        self.remove_partly_free(merged, len(free_slots))
        taken = free_slots[-count:]
        del free_slots[-count:]
        self.num_free_slots -= count
        if free_slots:
            self.add_partly_free(merged, len(free_slots))
        else:
            del self.free_slots[merged]
        return taken

    def update_evictable(self, merged: int) -> None:
        """Make a merged block evictable if all of its blocks are cached or free."""
        if self.num_cached[merged] + len(self.free_slots.get(merged, ())) == self.blocks_per_merged:
            self.evictable[merged] = self.last_used[merged]
            heapq.heappush(self.lru_heap, (self.last_used[merged], merged))
            if len(self.lru_heap) > 2 * len(self.evictable) + 64:
                self.lru_heap = [(tick, merged) for merged, tick in self.evictable.items()]
                heapq.heapify(self.lru_heap)

    def least_recently_used(self) -> tuple[int, int] | None:
        """(tick, merged) of the least recently used evictable merged block."""
        if self.blocks_per_merged == 1:
            merged, tick = next(iter(self.evictable.items()), (-1, -1))
            return (tick, merged) if self.evictable else None
        heap = self.lru_heap
        while heap and self.evictable.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None


def check_service_blocks(
    name: str, owned: ServiceBlocks, live: Sequence[int], cached: Sequence[tuple[int, int]]
) -> Collection[int]:
    """Recompute ``owned`` from live blocks and (cached block, tick) pairs; returns the merged blocks in use.

    Raises:
        IntegrityError: a block is missing or in two states, or a derived count is wrong.
    """
    per_merged = owned.blocks_per_merged
    free_blocks = [block for blocks in owned.free_slots.values() for block in blocks]
    all_blocks = [*live, *free_blocks, *(block for block, _ in cached)]
    if len(set(all_blocks)) != len(all_blocks):
        raise IntegrityError(f"{name}: a block is in two states at once")
    size = Counter([block // per_merged for block in all_blocks])
    if short := {merged: count for merged, count in size.items() if count != per_merged}:
        raise IntegrityError(f"{name}: merged blocks whose sub-blocks do not add up to {per_merged}: {short}")
    if owned.num_merged != len(size):
        raise IntegrityError(f"{name}: holds {len(size)} merged blocks, not {owned.num_merged}")
    if owned.num_free_slots != len(free_blocks):
        raise IntegrityError(f"{name}: {len(free_blocks)} free blocks, not {owned.num_free_slots}")
    for merged, blocks in owned.free_slots.items():
        if {block // per_merged for block in blocks} != {merged}:
            raise IntegrityError(f"{name}: free blocks {blocks} are not in merged block {merged}")
    by_num_free = {merged: count for count, group in owned.by_num_free.items() for merged in group}
    if by_num_free != {merged: len(blocks) for merged, blocks in owned.free_slots.items()}:
        raise IntegrityError(f"{name}: merged blocks are listed under a wrong number of free blocks")
    if not all(owned.by_num_free.values()):
        raise IntegrityError(f"{name}: an empty group of merged blocks was kept")
    _check_cached(name, owned, live, cached, size.keys())
    return size.keys()


def _check_cached(
    name: str,
    owned: ServiceBlocks,
    live: Sequence[int],
    cached: Sequence[tuple[int, int]],
    used: Collection[int],
) -> None:
    """Check the state derived from the cached blocks; ``used``: all merged blocks in use."""
    per_merged = owned.blocks_per_merged
    num_cached: dict[int, int] = {}
    last_used: dict[int, int] = {}
    for block, tick in cached:
        merged = block // per_merged
        num_cached[merged] = num_cached.get(merged, 0) + 1
        last_used[merged] = max(tick, last_used.get(merged, tick))
    if owned.num_cached != (num_cached if per_merged > 1 else {}):
        raise IntegrityError(
            f"{name}: cached blocks by merged block are {num_cached}, not {owned.num_cached}"
        )
    if set(owned.last_used) != (set(last_used) if per_merged > 1 else set()):
        raise IntegrityError(f"{name}: last uses are {last_used}, not {owned.last_used}")
    live_merged = {block // per_merged for block in live}
    unused = {merged: tick for merged, tick in last_used.items() if merged not in live_merged}
    if len(live_merged) + len(unused) != len(used):
        raise IntegrityError(f"{name}: holds a merged block without content")
    if owned.evictable != unused:
        raise IntegrityError(f"{name}: evictable merged blocks are {unused}, not {owned.evictable}")
    if per_merged == 1:
        listed = not owned.lru_heap
    else:
        listed = {(tick, merged) for merged, tick in unused.items()} <= set(owned.lru_heap)
    if not listed:
        raise IntegrityError(f"{name}: an evictable merged block cannot be found by its last use")
