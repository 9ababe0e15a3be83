"""The merged layout's books: a slab of merged blocks, each cut into sub-blocks of one service."""

from collections.abc import Collection, Sequence
from itertools import pairwise

from shoal.kvcache.compaction import choose_emptied, choose_targets, live_blocks, partly_live, releasable
from shoal.kvcache.held import Held, check_held
from shoal.kvcache.layout import PoolLayout
from shoal.kvcache.prefix import PrefixIndex
from shoal.kvcache.store import DtypeLog, require


class MergedStore:
    """Hands out sub-blocks: first from the fullest merged block that a service holds, then fresh ones.

    A merged block whose last sub-block is freed goes back to everybody at once. Filling the fullest
    first lets sparse ones run empty, which keeps external fragmentation down.
    """

    def __init__(self, layout: PoolLayout, indexes: Sequence[PrefixIndex]) -> None:
        views = list(layout.services.values())
        self._layout = layout
        self._indexes = indexes
        self._free = list(range(layout.merged_blocks - 1, -1, -1))
        self._held = [Held(view.blocks_per_merged) for view in views]
        for held, index in zip(self._held, indexes, strict=True):
            if held.per_merged == 1:
                held.idle = index.cached
        self._dtypes = DtypeLog(layout.merged_blocks, [view.shape.dtype for view in views])

    @property
    def free_merged(self) -> int:
        """Merged blocks that no service holds."""
        return len(self._free)

    def held_merged(self, service: int) -> int:
        """Merged blocks that a service holds."""
        return self._held[service].merged

    def free_held(self, service: int) -> int:
        """Free sub-blocks inside them."""
        return self._held[service].free_slots

    def available(self, service: int) -> int:
        """Blocks that ``take`` can give now."""
        held = self._held[service]
        return held.free_slots + len(self._free) * held.per_merged

    def attainable(self, service: int) -> int:
        """Blocks to be had if every cached block of its own and every idle merged block of others went."""
        held = self._held[service]
        foreign = sum(len(other.idle) for other in self._held if other is not held)
        return self.available(service) + len(self._indexes[service].cached) + foreign * held.per_merged

    def take(self, service: int, count: int) -> list[int]:
        """Make ``count`` (at most ``available``) free blocks live."""
        held = self._held[service]
        blocks = self._fill_holes(held, min(count, held.free_slots)) if held.free_slots else []
        wanted = count - len(blocks)
        if wanted:
            blocks += self._cut_fresh(service, held, wanted)
        return blocks

    def _fill_holes(self, held: Held, count: int) -> list[int]:
        blocks: list[int] = []
        held.free_slots -= count
        by_holes = held.by_holes
        while count:
            fewest = min(by_holes)
            same = by_holes[fewest]
            merged, _ = same.popitem()
            if not same:
                del by_holes[fewest]
            if held.idle:
                held.idle.pop(merged, None)
            if fewest <= count:
                blocks += held.holes.pop(merged)
                count -= fewest
            else:
                holes = held.holes[merged]
                blocks += holes[-count:]
                del holes[-count:]
                held.file(merged, fewest - count)
                count = 0
        return blocks

    def _cut_fresh(self, service: int, held: Held, count: int) -> list[int]:
        per_merged = held.per_merged
        needed = -(-count // per_merged)
        fresh = self._free[-needed:]
        del self._free[-needed:]
        fresh.reverse()
        held.merged += needed
        if self._dtypes.mixed:
            self._dtypes.taken(service, fresh)
        if per_merged == 1:
            return fresh
        blocks = [
            block for merged in fresh for block in range(merged * per_merged, (merged + 1) * per_merged)
        ]
        surplus = blocks[count:]
        if surplus:
            del blocks[count:]
            surplus.reverse()
            held.holes[fresh[-1]] = surplus
            held.file(fresh[-1], len(surplus))
            held.free_slots += len(surplus)
        return blocks

    def release(self, service: int, blocks: Sequence[int]) -> None:
        """Live blocks become free, and merged blocks that run empty go back to everybody."""
        held = self._held[service]
        per_merged = held.per_merged
        if per_merged == 1:
            self._free += blocks
            held.merged -= len(blocks)
            return
        all_holes = held.holes
        before: dict[int, int] = {}
        for block in blocks:
            merged = block // per_merged
            holes = all_holes.get(merged)
            if holes is None:
                all_holes[merged] = [block]
                before[merged] = 0
            else:
                if merged not in before:
                    before[merged] = len(holes)
                holes.append(block)
        held.free_slots += len(blocks)
        for merged, count in before.items():
            if count:
                held.unfile(merged, count)
            self._refile(held, merged)

    def _refile(self, held: Held, merged: int) -> None:
        count = len(held.holes[merged])
        if count == held.per_merged:
            self._give_back(held, merged)
            return
        held.file(merged, count)
        if merged in held.parked:
            held.note_if_idle(merged)

    def _give_back(self, held: Held, merged: int) -> None:
        """A merged block whose sub-blocks are all free, and which is not filed, leaves its service."""
        held.free_slots -= len(held.holes.pop(merged))
        held.merged -= 1
        self._free.append(merged)

    def park(self, service: int, blocks: Sequence[int], tick: int) -> None:
        """Live blocks become cached."""
        held = self._held[service]
        if held.per_merged == 1:
            return
        for at, block in enumerate(blocks, start=tick):
            merged = block // held.per_merged
            held.parked[merged] = held.parked.get(merged, 0) + 1
            held.newest[merged] = at
            held.note_if_idle(merged)

    def unpark(self, service: int, block: int) -> None:
        """A cached block becomes live, or is forgotten, and its merged block can no longer be evicted."""
        held = self._held[service]
        if held.per_merged == 1:
            return
        merged = block // held.per_merged
        held.idle.pop(merged, None)
        if held.parked[merged] > 1:
            held.parked[merged] -= 1
        else:
            del held.parked[merged]
            del held.newest[merged]

    def evict_coldest(self, service: int, missing: int) -> None:
        """Evict the service's own coldest cached blocks, or a whole merged block of another, if colder."""
        index = self._indexes[service]
        foreign = [
            (coldest[0], owner, coldest[1])
            for owner, other in enumerate(self._held)
            if owner != service and (coldest := other.coldest_idle()) is not None
        ]
        coldest_foreign = min(foreign, default=None)
        evicted = index.forget_oldest(missing, None if coldest_foreign is None else coldest_foreign[0])
        for block in evicted:
            self.unpark(service, block)
        if evicted:
            self.release(service, evicted)
        elif coldest_foreign is not None:
            _, owner, merged = coldest_foreign
            self._evict_merged(owner, merged)

    def _evict_block(self, service: int, block: int) -> None:
        self._indexes[service].forget(block)
        self.unpark(service, block)
        self.release(service, (block,))

    def _evict_merged(self, service: int, merged: int) -> None:
        held = self._held[service]
        index = self._indexes[service]
        first = merged * held.per_merged
        cached = [block for block in range(first, first + held.per_merged) if block in index.cached]
        for block in cached:
            index.forget(block)
        if held.per_merged > 1:
            del held.idle[merged], held.parked[merged], held.newest[merged]
        self.release(service, cached)

    def can_compact(self, service: int, count: int) -> bool:
        """See BlockStore."""
        missing = self._missing(service, count)
        if missing <= 0:
            return False
        spare = sum(
            releasable(held, len(index.cached), self._dtypes.dirty)
            for owner, (held, index) in enumerate(zip(self._held, self._indexes, strict=True))
            if owner != service
        )
        return spare >= missing

    def compact(self, service: int, count: int) -> list[tuple[int, int, int]]:
        """See BlockStore."""
        missing = self._missing(service, count)
        emptied = choose_emptied(self._held, service, missing, self._dtypes.dirty) if missing > 0 else None
        moves = []
        for owner, merged_blocks in (emptied or {}).items():
            moves += [(owner, source, target) for source, target in self._pack(owner, set(merged_blocks))]
        return moves

    def _missing(self, service: int, count: int) -> int:
        """Merged blocks that ``count`` blocks would need beyond what is free or may be evicted."""
        return -(-(count - self.attainable(service)) // self._held[service].per_merged)

    def _pack(self, service: int, emptied: Collection[int]) -> list[tuple[int, int]]:
        """Move the live blocks of the merged blocks ``emptied`` into others; (source, target) of each."""
        held, cached = self._held[service], self._indexes[service].cached
        kept = partly_live(held, self._dtypes.dirty)
        sources: list[int] = []
        for merged in emptied:
            sources += live_blocks(held, merged, cached)
            del kept[merged]
        gone = [block for block in cached if block // held.per_merged in emptied]
        short = len(sources) - sum(len(held.holes.get(merged, ())) for merged in kept)
        if short > 0:
            gone += [block for block in cached if block // held.per_merged in kept][:short]
        for block in gone:
            self._evict_block(service, block)
        targets: list[int] = []
        for merged, filled in choose_targets(held, kept, len(sources)):
            targets += held.fill(merged, filled)
        self.release(service, sources)
        return list(zip(sources, targets, strict=True))

    def take_dirty(self) -> tuple[int, ...]:
        """Merged blocks last written with another dtype, since the last call."""
        return self._dtypes.take_dirty()

    def check(self, live: Sequence[Sequence[int]]) -> None:
        """Compare the books with each service's live blocks; raises IntegrityError."""
        require(len(set(self._free)) == len(self._free), "a merged block is twice among the free ones")
        owners = dict.fromkeys(self._free, "nobody")
        for name, held, index, blocks in zip(
            self._layout.services, self._held, self._indexes, live, strict=True
        ):
            for merged in check_held(name, held, blocks, list(index.cached.items())):
                other = owners.setdefault(merged, name)
                require(other == name, f"merged block {merged} belongs to {name} and to {other}")
        known = set(range(self._layout.merged_blocks))
        require(owners.keys() == known, f"merged blocks {known ^ owners.keys()} are lost or unknown")
        self._check_overlap(live)

    def _check_overlap(self, live: Sequence[Sequence[int]]) -> None:
        """No two blocks with content share a byte, and all lie inside the buffer."""
        extents = []
        for view, index, blocks in zip(self._layout.services.values(), self._indexes, live, strict=True):
            size = view.shape.block_bytes(self._layout.block_size)
            for block in (*blocks, *index.cached):
                start = block * view.stride_bytes
                extents.append((start, start + size, view.service, block))
        extents.sort()
        for left, right in pairwise(extents):
            require(left[1] <= right[0], f"blocks {left[2:]} and {right[2:]} overlap in bytes")
        if extents:
            require(extents[0][0] >= 0, "a block starts before the buffer")
            require(max(e[1] for e in extents) <= self._layout.total_bytes, "a block ends behind the buffer")
