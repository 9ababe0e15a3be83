"""Block allocation and LRU eviction in the merged layout: each merged block is divided for one service."""

from collections.abc import Collection, Sequence
from itertools import pairwise

from shoal.kvcache.allocator import DtypeLog, IntegrityError
from shoal.kvcache.compaction import choose_sources, choose_targets, live_blocks, num_releasable, partly_live
from shoal.kvcache.layout import PoolLayout, ServiceLayout
from shoal.kvcache.prefix import PrefixIndex
from shoal.kvcache.service_blocks import ServiceBlocks, check_service_blocks


class MergedAllocator:
    """Allocates sub-blocks from the fullest merged block of the service, then from free merged blocks.

    A merged block whose last sub-block is freed is available to every service. Filling the fullest first lets
    sparse ones become empty, which keeps external fragmentation low.
    """

    def __init__(self, layout: PoolLayout, indexes: Sequence[PrefixIndex]) -> None:
        views = list(layout.services.values())
        self._layout = layout
        self._indexes = indexes
        self._free_merged = list(range(layout.merged_blocks - 1, -1, -1))
        """Merged blocks that no service holds; the last is allocated first."""
        self._owned = [_new_service_blocks(view, index) for view, index in zip(views, indexes, strict=True)]
        self._dtypes = DtypeLog(layout.merged_blocks, [view.shape.dtype for view in views])

    def change_services(self, layout: PoolLayout, indexes: Sequence[PrefixIndex]) -> None:
        """Add services, and remove services without live blocks. The merged blocks do not change.

        indexes: of all services in ``layout``, in its order.
        """
        held = dict(zip(self._layout.services, self._owned, strict=True))
        for number, name in enumerate(self._layout.services):
            if name not in layout.services:
                for block in list(self._indexes[number].cached):
                    self._evict_block(number, block)
                if held[name].num_merged:
                    raise IntegrityError(f"{name} is to be removed, but holds merged blocks")
        self._owned = [
            held.get(name) or _new_service_blocks(view, index)
            for (name, view), index in zip(layout.services.items(), indexes, strict=True)
        ]
        self._layout, self._indexes = layout, indexes
        self._dtypes.change_services([view.shape.dtype for view in layout.services.values()])

    @property
    def free_merged(self) -> int:
        return len(self._free_merged)

    def num_merged(self, service: int) -> int:
        return self._owned[service].num_merged

    def num_free_slots(self, service: int) -> int:
        return self._owned[service].num_free_slots

    def available(self, service: int) -> int:
        owned = self._owned[service]
        return owned.num_free_slots + len(self._free_merged) * owned.blocks_per_merged

    def available_after_eviction(self, service: int) -> int:
        """Blocks available after evicting own cached blocks and other services' evictable merged blocks."""
        owned = self._owned[service]
        foreign = sum(len(other.evictable) for other in self._owned if other is not owned)
        return (
            self.available(service) + len(self._indexes[service].cached) + foreign * owned.blocks_per_merged
        )

    def take(self, service: int, count: int) -> list[int]:
        owned = self._owned[service]
        blocks = (
            self._take_free_slots(owned, min(count, owned.num_free_slots)) if owned.num_free_slots else []
        )
        wanted = count - len(blocks)
        if wanted:
            blocks += self._take_fresh(service, owned, wanted)
        return blocks

    def _take_free_slots(self, owned: ServiceBlocks, count: int) -> list[int]:
        blocks: list[int] = []
        owned.num_free_slots -= count
        by_num_free = owned.by_num_free
        while count:
            fewest = min(by_num_free)
            equally_free = by_num_free[fewest]
            merged, _ = equally_free.popitem()
            if not equally_free:
                del by_num_free[fewest]
            if owned.evictable:
                owned.evictable.pop(merged, None)
            if fewest <= count:
                blocks += owned.free_slots.pop(merged)
                count -= fewest
            else:
                free_slots = owned.free_slots[merged]
                blocks += free_slots[-count:]
                del free_slots[-count:]
                owned.add_partly_free(merged, fewest - count)
                count = 0
        return blocks

    def _take_fresh(self, service: int, owned: ServiceBlocks, count: int) -> list[int]:
        per_merged = owned.blocks_per_merged
        needed = -(-count // per_merged)
        fresh = self._free_merged[-needed:]
        del self._free_merged[-needed:]
        fresh.reverse()
        owned.num_merged += needed
        if self._dtypes.mixed:
            self._dtypes.record(service, fresh)
        if per_merged == 1:
            return fresh
        blocks = [
            block for merged in fresh for block in range(merged * per_merged, (merged + 1) * per_merged)
        ]
        surplus = blocks[count:]
        if surplus:
            del blocks[count:]
            surplus.reverse()
            owned.free_slots[fresh[-1]] = surplus
            owned.add_partly_free(fresh[-1], len(surplus))
            owned.num_free_slots += len(surplus)
        return blocks

    def release(self, service: int, blocks: Sequence[int]) -> None:
        """Live blocks become free, and empty merged blocks become free for every service."""
        owned = self._owned[service]
        per_merged = owned.blocks_per_merged
        if per_merged == 1:
            self._free_merged += blocks
            owned.num_merged -= len(blocks)
            return
        all_free_slots = owned.free_slots
        before: dict[int, int] = {}
        for block in blocks:
            merged = block // per_merged
            free_slots = all_free_slots.get(merged)
            if free_slots is None:
                all_free_slots[merged] = [block]
                before[merged] = 0
            else:
                if merged not in before:
                    before[merged] = len(free_slots)
                free_slots.append(block)
        owned.num_free_slots += len(blocks)
        for merged, count in before.items():
            if count:
                owned.remove_partly_free(merged, count)
            self._update_freed(owned, merged)

    def _update_freed(self, owned: ServiceBlocks, merged: int) -> None:
        """Update a merged block in which sub-blocks were freed; release it if all are free."""
        count = len(owned.free_slots[merged])
        if count == owned.blocks_per_merged:
            self._release_merged(owned, merged)
            return
        owned.add_partly_free(merged, count)
        if merged in owned.num_cached:
            owned.update_evictable(merged)

    def _release_merged(self, owned: ServiceBlocks, merged: int) -> None:
        """Return a merged block whose sub-blocks are all free."""
        owned.num_free_slots -= len(owned.free_slots.pop(merged))
        owned.num_merged -= 1
        self._free_merged.append(merged)

    def add_cached(self, service: int, blocks: Sequence[int], tick: int) -> None:
        owned = self._owned[service]
        if owned.blocks_per_merged == 1:
            return
        for block_tick, block in enumerate(blocks, start=tick):
            merged = block // owned.blocks_per_merged
            owned.num_cached[merged] = owned.num_cached.get(merged, 0) + 1
            owned.last_used[merged] = block_tick
            owned.update_evictable(merged)

    def remove_cached(self, service: int, block: int) -> None:
        """A cached block becomes live or is evicted, so its merged block is no longer evictable."""
        owned = self._owned[service]
        if owned.blocks_per_merged == 1:
            return
        merged = block // owned.blocks_per_merged
        owned.evictable.pop(merged, None)
        if owned.num_cached[merged] > 1:
            owned.num_cached[merged] -= 1
        else:
            del owned.num_cached[merged]
            del owned.last_used[merged]

    def evict_lru(self, service: int, missing: int) -> None:
        """Evict the service's own oldest cached blocks, or an older merged block of another service."""
        index = self._indexes[service]
        foreign = [
            (oldest[0], owner, oldest[1])
            for owner, other in enumerate(self._owned)
            if owner != service and (oldest := other.least_recently_used()) is not None
        ]
        oldest_foreign = min(foreign, default=None)
        evicted = index.evict_oldest(missing, None if oldest_foreign is None else oldest_foreign[0])
        for block in evicted:
            self.remove_cached(service, block)
        if evicted:
            self.release(service, evicted)
        elif oldest_foreign is not None:
            _, owner, merged = oldest_foreign
            self._evict_merged(owner, merged)

    def _evict_block(self, service: int, block: int) -> None:
        self._indexes[service].evict(block)
        self.remove_cached(service, block)
        self.release(service, (block,))

    def _evict_merged(self, service: int, merged: int) -> None:
        owned = self._owned[service]
        index = self._indexes[service]
        first = merged * owned.blocks_per_merged
        cached = [block for block in range(first, first + owned.blocks_per_merged) if block in index.cached]
        for block in cached:
            index.evict(block)
        if owned.blocks_per_merged > 1:
            del owned.evictable[merged], owned.num_cached[merged], owned.last_used[merged]
        self.release(service, cached)

    def can_compact(self, service: int, count: int) -> bool:
        missing = self._missing_merged(service, count)
        if missing <= 0:
            return False
        spare = sum(
            num_releasable(owned, len(index.cached), self._dtypes.dirty)
            for owner, (owned, index) in enumerate(zip(self._owned, self._indexes, strict=True))
            if owner != service
        )
        return spare >= missing

    def compact(self, service: int, count: int) -> list[tuple[int, int, int]]:
        missing = self._missing_merged(service, count)
        emptied = choose_sources(self._owned, service, missing, self._dtypes.dirty) if missing > 0 else None
        moves = []
        for owner, merged_blocks in (emptied or {}).items():
            moves += [(owner, source, target) for source, target in self._pack(owner, set(merged_blocks))]
        return moves

    def _missing_merged(self, service: int, count: int) -> int:
        """Merged blocks needed for ``count`` blocks beyond those that are free or evictable."""
        return -(-(count - self.available_after_eviction(service)) // self._owned[service].blocks_per_merged)

    def _pack(self, service: int, emptied: Collection[int]) -> list[tuple[int, int]]:
        """Empty merged blocks into others of the service; returns (source, target) of each live block."""
        owned, cached = self._owned[service], self._indexes[service].cached
        kept = partly_live(owned, self._dtypes.dirty)
        sources: list[int] = []
        for merged in emptied:
            sources += live_blocks(owned, merged, cached)
            del kept[merged]
        evicted = [block for block in cached if block // owned.blocks_per_merged in emptied]
        missing_slots = len(sources) - sum(len(owned.free_slots.get(merged, ())) for merged in kept)
        if missing_slots > 0:
            evicted += [block for block in cached if block // owned.blocks_per_merged in kept][:missing_slots]
        for block in evicted:
            self._evict_block(service, block)
        targets: list[int] = []
        for merged, filled in choose_targets(owned, kept, len(sources)):
            targets += owned.take_slots(merged, filled)
        self.release(service, sources)
        return list(zip(sources, targets, strict=True))

    def take_dirty(self) -> tuple[int, ...]:
        return self._dtypes.take_dirty()

    def check(self, live: Sequence[Sequence[int]]) -> None:
        owners = dict.fromkeys(self._free_merged, "the free ones")
        if len(owners) != len(self._free_merged):
            raise IntegrityError("a merged block is twice among the free ones")
        for name, owned, index, blocks in zip(
            self._layout.services, self._owned, self._indexes, live, strict=True
        ):
            for merged in check_service_blocks(name, owned, blocks, list(index.cached.items())):
                other = owners.setdefault(merged, name)
                if other != name:
                    raise IntegrityError(f"merged block {merged} belongs to {name} and to {other}")
        known = set(range(self._layout.merged_blocks))
        if owners.keys() != known:
            raise IntegrityError(f"merged blocks {owners.keys() ^ known} are lost or unknown")
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
            if left[1] > right[0]:
                raise IntegrityError(f"blocks {left[2:]} and {right[2:]} overlap in bytes")
        # Without overlaps the last to begin is the last to end.
        if extents and extents[0][0] < 0:
            raise IntegrityError("a block starts before the buffer")
        if extents and extents[-1][1] > self._layout.total_bytes:
            raise IntegrityError("a block ends behind the buffer")


def _new_service_blocks(view: ServiceLayout, index: PrefixIndex) -> ServiceBlocks:
    owned = ServiceBlocks(view.blocks_per_merged)
    if owned.blocks_per_merged == 1:
        owned.evictable = index.cached
    return owned
