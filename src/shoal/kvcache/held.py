"""What one service holds of the merged blocks, and the proof that these books are right."""

import heapq
from collections import Counter
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, field

from shoal.kvcache.store import require


@dataclass(slots=True)
class Held:
    """What one service holds. "Merged" stands for the number of a merged block.

    holes: free block ids by merged, of merged blocks with at least one. by_holes: merged blocks (a set
    in order) by their number of holes. free_slots: all holes. parked: cached blocks by merged.
    newest: tick of the last park, by merged with parked blocks. idle: merged blocks without any live
    block, with the tick of their most recently used cached block; they may be evicted for others.
    coldest: heap of (tick, merged) over ``idle``, with outdated entries among them.

    Where a merged block is one block (``per_merged`` 1), ``idle`` is the prefix index's own mapping of cached
    blocks, oldest first, and ``parked``, ``newest`` and ``coldest`` stay empty.
    """

    per_merged: int
    merged: int = 0
    free_slots: int = 0
    holes: dict[int, list[int]] = field(default_factory=dict)
    by_holes: dict[int, dict[int, None]] = field(default_factory=dict)
    parked: dict[int, int] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    idle: MutableMapping[int, int] = field(default_factory=dict)
    coldest: list[tuple[int, int]] = field(default_factory=list)

    def file(self, merged: int, count: int) -> None:
        """Enter a merged block with ``count`` holes."""
        same = self.by_holes.get(count)
        if same is None:
            self.by_holes[count] = {merged: None}
        else:
            same[merged] = None

    def unfile(self, merged: int, count: int) -> None:
        """Take out a merged block with ``count`` holes."""
        same = self.by_holes[count]
        del same[merged]
        if not same:
            del self.by_holes[count]

    def fill(self, merged: int, count: int) -> list[int]:
        """Take ``count`` holes of one merged block, which has as many and stays in use."""
        holes = self.holes[merged]
        self.unfile(merged, len(holes))
        taken = holes[-count:]
        del holes[-count:]
        self.free_slots -= count
        if holes:
            self.file(merged, len(holes))
        else:
            del self.holes[merged]
        return taken

    def note_if_idle(self, merged: int) -> None:
        """A merged block that holds only cached and free sub-blocks may be evicted from now on."""
        if self.parked[merged] + len(self.holes.get(merged, ())) == self.per_merged:
            self.idle[merged] = self.newest[merged]
            heapq.heappush(self.coldest, (self.newest[merged], merged))
            if len(self.coldest) > 2 * len(self.idle) + 64:
                self.coldest = [(tick, one) for one, tick in self.idle.items()]
                heapq.heapify(self.coldest)

    def coldest_idle(self) -> tuple[int, int] | None:
        """Tick and merged of the idle merged block whose last use is longest ago."""
        if self.per_merged == 1:
            merged, tick = next(iter(self.idle.items()), (-1, -1))
            return (tick, merged) if self.idle else None
        heap = self.coldest
        while heap and self.idle.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None


def check_held(
    name: str, held: Held, live: Sequence[int], cached: Sequence[tuple[int, int]]
) -> Collection[int]:
    """Recompute ``held`` from live blocks and (cached block, tick) pairs; the merged blocks in use.

    Raises:
        IntegrityError: a sub-block is missing or in two states, or a derived count is off.
    """
    per_merged = held.per_merged
    holes = [block for blocks in held.holes.values() for block in blocks]
    every = [*live, *holes, *(block for block, _ in cached)]
    require(len(set(every)) == len(every), f"{name}: a block is in two states at once")
    size = Counter(block // per_merged for block in every)
    short = {merged: count for merged, count in size.items() if count != per_merged}
    require(not short, f"{name}: merged blocks whose sub-blocks do not add up to {per_merged}: {short}")
    require(held.merged == len(size), f"{name}: holds {len(size)} merged blocks, the books say {held.merged}")
    require(held.free_slots == len(holes), f"{name}: {len(holes)} holes, the books say {held.free_slots}")
    for merged, blocks in held.holes.items():
        home = {block // per_merged for block in blocks}
        require(home == {merged}, f"{name}: holes {blocks} are filed under merged block {merged}")
    by_holes = {merged: count for count, same in held.by_holes.items() for merged in same}
    counted = {merged: len(blocks) for merged, blocks in held.holes.items()}
    require(by_holes == counted, f"{name}: merged blocks are filed under a wrong number of holes")
    require(all(held.by_holes.values()), f"{name}: an empty file of merged blocks was kept")
    parked = Counter(block // per_merged for block, _ in cached)
    newest: dict[int, int] = {}
    for block, tick in cached:
        newest[block // per_merged] = max(tick, newest.get(block // per_merged, tick))
    noted = (parked, newest.keys()) if per_merged > 1 else ({}, set())
    require(held.parked == noted[0], f"{name}: cached blocks by merged block are {parked}, not {held.parked}")
    require(held.newest.keys() == noted[1], f"{name}: {newest} are last uses, the books say {held.newest}")
    in_use = {block // per_merged for block in live}
    require(in_use | parked.keys() == size.keys(), f"{name}: holds a merged block without content")
    idle = {merged: newest[merged] for merged in size.keys() - in_use}
    require(held.idle == idle, f"{name}: evictable merged blocks are {idle}, not {held.idle}")
    listed = {(tick, merged) for merged, tick in idle.items()} <= set(held.coldest)
    require(
        listed if per_merged > 1 else not held.coldest,
        f"{name}: an evictable merged block cannot be found by its last use",
    )
    return size.keys()
