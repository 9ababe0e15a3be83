"""BlockPool: allocates, shares, caches and frees the KV blocks of all services of a device group."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from shoal.kvcache.allocator import BlockAllocator, IntegrityError
from shoal.kvcache.compaction import BlockMove
from shoal.kvcache.layout import PoolLayout
from shoal.kvcache.layout_changes import keeps_blocks
from shoal.kvcache.merged_allocator import MergedAllocator
from shoal.kvcache.prefix import PrefixIndex
from shoal.kvcache.split_allocator import SplitAllocator, Units
from shoal.kvcache.usage import PoolUsage, ServiceUsage


class _ServiceState:
    def __init__(self, number: int, name: str, max_blocks: int, index: PrefixIndex) -> None:
        self.number = number
        """Index in the layout."""
        self.name = name
        # A list: access to single entries is several times faster than in a NumPy array.
        self.ref_counts = [0] * max_blocks
        """By block id."""
        self.index = index
        self.num_live = 0
        """Blocks with references."""


class BlockPool:
    """Allocates blocks by id, counts references, and keeps finished prefixes for reuse.

    A block is free, live (it has references) or cached (published, without references). Block ids are
    separate for each service. The pool holds no tensors; block ids become addresses through ``layout`` (and
    ``unit_ids`` in the split layout).

    Methods raise KeyError for a service that the layout does not have.
    """

    def __init__(self, layout: PoolLayout, prefix_caching: bool = True) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        """Tokens per block."""
        self.capacity = layout.merged_blocks
        """Merged blocks (split: units) of the pool."""
        self.prefix_caching = prefix_caching
        """Without it, no block needs a hash."""
        self._services: dict[str, _ServiceState] = {}
        self._split: SplitAllocator | None = None
        self._allocator: BlockAllocator
        self._reset()
        self._tick = 0

    def _reset(self) -> None:
        """Free all memory, and follow ``layout``."""
        layout = self.layout
        indexes = self._set_services(kept={})
        self._split = SplitAllocator(layout, indexes) if layout.kind == "split" else None
        self._allocator = self._split or MergedAllocator(layout, indexes)

    def _set_services(self, kept: Mapping[str, _ServiceState]) -> list[PrefixIndex]:
        """Create the states of the layout's services, except those ``kept``; returns their indexes."""
        self._services = {
            name: kept.get(name) or _ServiceState(number, name, self.max_blocks(name), PrefixIndex())
            for number, name in enumerate(self.layout.services)
        }
        for number, state in enumerate(self._services.values()):
            state.number = number
        return [state.index for state in self._services.values()]

    def lay_out(self, layout: PoolLayout) -> None:
        """Change the layout, and with it the services.

        If merged blocks and the views of remaining services are the same in both layouts, their blocks keep
        ids and content, and only removed services must have no live blocks. With any other layout no service
        may have live blocks, and all cached blocks are dropped. The caller's tensors have to follow.

        Raises:
            IntegrityError: a service still has live blocks; then nothing changes.
            ValueError: one of the layouts is a split one.
        """
        old, merged = self.layout, self._allocator
        if layout.kind == "split" or not isinstance(merged, MergedAllocator):
            raise ValueError("only a merged layout can be changed while it is in use")
        unchanged = keeps_blocks(old, layout)
        services = self._services
        kept = {name: state for name, state in services.items() if unchanged and name in layout.services}
        for name, state in services.items():
            if name not in kept and state.num_live:
                raise IntegrityError(f"{name} has live blocks, which the new layout would drop")
        self.layout, self.capacity = layout, layout.merged_blocks
        if unchanged:
            merged.change_services(layout, self._set_services(kept))
        else:
            self._reset()

    def allocate(self, service: str, count: int) -> list[int] | None:
        """``count`` blocks with one reference each; None, and nothing changes, if they do not fit.

        Takes free memory first, then evicts cached blocks, least recently used first: single blocks of this
        service, whole merged blocks of other services (by the last use of any block in them).
        """
        state = self._services[service]
        allocator = self._allocator
        number = state.number
        missing = count - allocator.available(number)
        if missing > 0:
            if allocator.available_after_eviction(number) < count:
                return None
            while missing > 0:
                allocator.evict_lru(number, missing)
                missing = count - allocator.available(number)
        blocks = allocator.take(number, count)
        ref_counts = state.ref_counts
        for block in blocks:
            ref_counts[block] = 1
        state.num_live += count
        return blocks

    def can_allocate(self, service: str, count: int, *, evict: bool = True) -> bool:
        """Whether ``allocate`` would succeed now; without ``evict``: also without evicting cached blocks."""
        number = self._services[service].number
        return (
            self._allocator.available_after_eviction(number) if evict else self._allocator.available(number)
        ) >= count

    def can_compact(self, service: str, count: int) -> bool:
        """Whether ``compact`` would make room for ``count`` blocks that cannot be allocated now."""
        return self._allocator.can_compact(self._services[service].number, count)

    def compact(self, service: str, count: int) -> list[BlockMove] | None:
        """Pack live blocks of other services, so that ``allocate(service, count)`` succeeds afterwards.

        The pool's state changes at once; the caller renames the blocks in its block tables, and has the
        content moved before anything is written into blocks allocated later. Sources and targets share no
        merged block, so the moves may be done in any order, and before merged blocks are zeroed: those still
        to be zeroed (``take_dirty``) are not packed. As few merged blocks as possible are emptied, the
        emptiest first; cached blocks in them are evicted, and further ones if there are too few free slots.

        Returns None, and nothing changes, if ``allocate`` would succeed already, if even packing does not
        make enough room, and always in the split layout, in which every service can use every unit.
        """
        moves = []
        names = list(self._services)
        for owner, source, target in self._allocator.compact(self._services[service].number, count):
            state = self._services[names[owner]]
            state.ref_counts[target] = state.ref_counts[source]
            state.ref_counts[source] = 0
            state.index.rename(source, target)
            moves.append(BlockMove(state.name, source, target))
        return moves or None

    def free(self, service: str, blocks: Sequence[int]) -> None:
        """Remove one reference from each block of a block table, given in its order.

        Blocks without references become free; published ones stay cached, the last of the table being
        the first to be evicted, since a block can only be found together with the blocks before it.

        Raises:
            IntegrityError: a block has no reference.
        """
        state = self._services[service]
        ref_counts = state.ref_counts
        published = state.index.hash_of
        if not published and [ref_counts[block] for block in blocks].count(1) == len(blocks):
            # Fast path: no block is shared or published.
            for block in blocks:
                ref_counts[block] = 0
            state.num_live -= len(blocks)
            self._allocator.release(state.number, blocks[::-1])
            return
        unused: list[int] = []
        cached: list[int] = []
        for block in reversed(blocks):
            left = ref_counts[block] - 1
            if left < 0:
                raise IntegrityError(f"{service}: block {block} is freed but has no reference")
            ref_counts[block] = left
            if not left:
                (cached if block in published else unused).append(block)
        state.num_live -= len(unused) + len(cached)
        if cached:
            state.index.add_cached(cached, self._tick + 1)
            self._allocator.add_cached(state.number, cached, self._tick + 1)
            self._tick += len(cached)
        if unused:
            self._allocator.release(state.number, unused)

    def share(self, service: str, blocks: Sequence[int]) -> None:
        """Add one reference to each of these live blocks (fork of a block table).

        Raises:
            IntegrityError: a block has no reference; then nothing changes.
        """
        ref_counts = self._services[service].ref_counts
        for block in blocks:
            if ref_counts[block] <= 0:
                raise IntegrityError(f"{service}: block {block} is shared but has no reference")
        for block in blocks:
            ref_counts[block] += 1

    def is_shared(self, service: str, block: int) -> bool:
        """Whether writing needs a copy first: the block has further references, or is in the prefix index."""
        state = self._services[service]
        return state.ref_counts[block] > 1 or block in state.index.hash_of

    def match_prefix(self, service: str, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest published prefix of ``hashes``, each with one more reference."""
        state = self._services[service]
        blocks = state.index.longest_prefix(hashes)
        for block in blocks:
            if state.ref_counts[block] == 0:
                state.index.remove_cached(block)
                self._allocator.remove_cached(state.number, block)
                state.num_live += 1
            state.ref_counts[block] += 1
        return blocks

    def publish(self, service: str, blocks: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Add live blocks with final content to the prefix index, under one hash each.

        A hash that another block already has stays with that block. Without prefix caching nothing happens.
        Returns the number of blocks before the first that other requests cannot find.

        Raises:
            IntegrityError: a block has no reference, or was published under another hash.
        """
        if not self.prefix_caching:
            return 0
        state = self._services[service]
        ref_counts, index = state.ref_counts, state.index
        unreferenced = [block for block in blocks if ref_counts[block] < 1]
        if unreferenced:
            raise IntegrityError(f"{service}: block {unreferenced[0]} is published but has no reference")
        if index.publish(blocks, hashes):
            return len(blocks)
        num_cacheable = -1
        for place, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            known = index.hash_of.get(block)
            if known is None:
                published = index.publish((block,), (block_hash,))
                if not published and num_cacheable < 0 and not self.is_shared(service, block):
                    num_cacheable = place
            elif known != block_hash:
                raise IntegrityError(f"{service}: block {block} is published under another hash")
        return len(blocks) if num_cacheable < 0 else num_cacheable

    def merged_demand(self, service: str, blocks: int) -> int:
        """Merged blocks (split: units) that ``blocks`` blocks occupy when packed."""
        view = self.layout.services[service]
        return -(-blocks // view.blocks_per_merged) * view.units_per_block

    def max_blocks(self, service: str) -> int:
        """Blocks of the service that fit in the whole pool."""
        view = self.layout.services[service]
        return self.capacity * view.blocks_per_merged // view.units_per_block

    def live_blocks(self, service: str) -> int:
        """Blocks with references."""
        return self._services[service].num_live

    def take_dirty(self) -> tuple[int, ...]:
        """Merged blocks (split: units) to zero before use, since the last call.

        They were last used with another dtype, so their old bits may read as NaN. A first use is not
        reported: what no step has written never affects a result. Call it after the allocations of a step and
        before its forward pass; zeroing later would erase what the step wrote. Each call ends a step in the
        sense of ``unit_ids``.
        """
        return self._allocator.take_dirty()

    def unit_ids(self, service: str, blocks: Sequence[int], *, before: bool = False) -> Units:
        """Split layout: the units of each block, int32 ``[len(blocks), units_per_block]``, a copy.

        Columns go by layer and then KV head (``LayerExtent.first_unit + head``); a unit starts at byte
        ``unit * layout.merged_bytes``. Valid while the blocks are live.

        before: as before the step that the last ``take_dirty`` ended. So the content of a block that this
        step freed, and perhaps allocated again with other units, can still be found.

        Raises:
            ValueError: the pool has the merged layout, where a block's id is its address.
        """
        if self._split is None:
            raise ValueError("unit_ids is for the split layout; in the merged one use id * stride_bytes")
        return self._split.unit_ids(self._services[service].number, blocks, before)

    def usage(self) -> PoolUsage:
        """A snapshot of memory usage."""
        services = {}
        for name, state in self._services.items():
            view = self.layout.services[name]
            services[name] = ServiceUsage(
                live_blocks=state.num_live,
                cached_blocks=len(state.index.cached),
                free_blocks=self._allocator.num_free_slots(state.number),
                merged_blocks=self._allocator.num_merged(state.number),
                block_bytes=view.held_block_bytes,
                token_bytes=view.shape.token_bytes(),
            )
        return PoolUsage(
            capacity=self.capacity,
            free_merged=self._allocator.free_merged,
            services=services,
            total_bytes=self.layout.total_bytes,
            live_bytes=sum(used.live_blocks * used.block_bytes for used in services.values()),
        )

    def check_integrity(self, tables: Mapping[str, Iterable[Sequence[int]]] | None = None) -> None:
        """Recompute the state: free + live + cached = total everywhere.

        tables: all block tables in use, by service; if given, reference counts are compared with them.

        Raises:
            IntegrityError: the message says what is inconsistent.
        """
        live = []
        for name, state in self._services.items():
            ref_counts = state.ref_counts
            if tables is not None:
                expected = Counter(block for table in tables.get(name, ()) for block in table)
                actual = {block: count for block, count in enumerate(ref_counts) if count}
                if actual != expected:
                    raise IntegrityError(f"{name}: references are {actual}, the tables say {expected}")
            if min(ref_counts, default=0) < 0:
                raise IntegrityError(f"{name}: a reference count is negative")
            live.append(list(compress(range(len(ref_counts)), ref_counts)))
            if state.num_live != len(live[-1]):
                raise IntegrityError(f"{name}: {len(live[-1])} live blocks, not {state.num_live}")
            self._check_index(state)
        self._allocator.check(live)

    def _check_index(self, state: _ServiceState) -> None:
        index = state.index
        inverse = {block: block_hash for block_hash, block in index.block_of.items()}
        if inverse != index.hash_of:
            raise IntegrityError(f"{state.name}: hashes and published blocks do not match")
        cached = {block for block in index.hash_of if state.ref_counts[block] == 0}
        if cached != index.cached.keys():
            raise IntegrityError(f"{state.name}: cached blocks are {set(index.cached)}, not {cached}")
        ticks = list(index.cached.values())
        if ticks != sorted(set(ticks)) or (ticks and ticks[-1] > self._tick):
            raise IntegrityError(f"{state.name}: cached blocks are not in the order of their last use")
