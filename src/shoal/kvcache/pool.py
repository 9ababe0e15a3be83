"""The pool of KV blocks that the services of one device group share."""

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
    """The pool's state of one service."""

    def __init__(self, number: int, name: str, max_blocks: int, index: PrefixIndex) -> None:
        self.number = number
        """Place in the layout's order."""
        self.name = name
        """Name of the service."""
        # A list: reading and writing single entries is several times as fast as in a NumPy array.
        self.ref_counts = [0] * max_blocks
        """Number of references by block id."""
        self.index = index
        """The service's published blocks."""
        self.num_live = 0
        """Blocks with references."""


class BlockPool:
    """Allocates blocks by number, counts references, and keeps finished prefixes for reuse.

    A block is free, live (it has references) or cached (published, without references). Blocks of
    different services are different things even where their numbers are equal. The pool holds no
    tensors; block numbers become addresses through ``layout`` (and ``unit_ids`` in the split layout).

    Methods raise KeyError for a service that the layout does not have.
    """

    def __init__(self, layout: PoolLayout, prefix_caching: bool = True) -> None:
        self.layout = layout
        """Sizes and addresses of all blocks."""
        self.block_size = layout.block_size
        """Tokens per block."""
        self.capacity = layout.merged_blocks
        """Merged blocks (split: units) of the pool."""
        self.prefix_caching = prefix_caching
        """Whether published blocks are kept and found; without it no block needs a hash."""
        self._services: dict[str, _ServiceState] = {}
        self._split: SplitAllocator | None = None
        self._store: BlockAllocator
        self._cut()
        self._tick = 0

    def _cut(self) -> None:
        """Begin with all of the memory free."""
        layout = self.layout
        indexes = self._list_services(kept={})
        self._split = SplitAllocator(layout, indexes) if layout.kind == "split" else None
        self._store = self._split or MergedAllocator(layout, indexes)

    def _list_services(self, kept: Mapping[str, _ServiceState]) -> list[PrefixIndex]:
        """Enter the services of the layout, some of them with what they have; returns their indexes."""
        self._services = {
            name: kept.get(name) or _ServiceState(number, name, self.max_blocks(name), PrefixIndex())
            for number, name in enumerate(self.layout.services)
        }
        for number, state in enumerate(self._services.values()):
            state.number = number
        return [state.index for state in self._services.values()]

    def lay_out(self, layout: PoolLayout) -> None:
        """Let other services have the memory; those of the old layout that are not in the new one go.

        As long as merged blocks and the views of services that stay are the same, their blocks keep numbers
        and content, and only services that go must hold no live block. With any other layout nobody may hold
        one, and all cached blocks are forgotten. The caller's tensors have to follow.

        Raises:
            IntegrityError: somebody still holds blocks; then nothing changes.
            ValueError: one of the layouts is a split one.
        """
        old, merged = self.layout, self._store
        if layout.kind == "split" or not isinstance(merged, MergedAllocator):
            raise ValueError("only a merged layout can be changed while it is in use")
        stays = keeps_blocks(old, layout)
        kept = {name: state for name, state in self._services.items() if stays and name in layout.services}
        for name, state in self._services.items():
            if name not in kept and state.num_live:
                raise IntegrityError(f"{name} has live blocks, but is to give up its own")
        self.layout, self.capacity = layout, layout.merged_blocks
        if stays:
            merged.change_services(layout, self._list_services(kept))
        else:
            self._cut()

    def allocate(self, service: str, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None, and nothing changes, where they do not fit.

        Takes free memory first; then evicts cached blocks, least recently used first: single ones of this
        service, whole merged blocks of others (as old as their most recently used block).
        """
        state = self._services[service]
        store = self._store
        number = state.number
        missing = count - store.available(number)
        if missing > 0:
            if store.available_after_eviction(number) < count:
                return None
            while missing > 0:
                store.evict_lru(number, missing)
                missing = count - store.available(number)
        blocks = store.take(number, count)
        ref_counts = state.ref_counts
        for block in blocks:
            ref_counts[block] = 1
        state.num_live += count
        return blocks

    def can_allocate(self, service: str, count: int, *, evict: bool = True) -> bool:
        """Whether ``allocate`` would succeed now; without ``evict``: whether it would evict nothing."""
        number = self._services[service].number
        return (
            self._store.available_after_eviction(number) if evict else self._store.available(number)
        ) >= count

    def can_compact(self, service: str, count: int) -> bool:
        """Whether ``compact`` would make room for ``count`` blocks that cannot be allocated now."""
        return self._store.can_compact(self._services[service].number, count)

    def compact(self, service: str, count: int) -> list[BlockMove] | None:
        """Pack live blocks of other services, so that ``allocate(service, count)`` succeeds afterwards.

        The pool's state changes at once; the caller renames the blocks in its tables, and has the content
        moved before anything is written into blocks allocated later. Sources and targets share no merged
        block, so the moves may be carried out in any order, and before merged blocks are zeroed: those yet
        to be zeroed (``take_dirty``) take no part. As few merged blocks as possible are emptied, the emptiest
        first; cached blocks in them are evicted, and others where the free slots do not suffice.

        Returns None, and nothing changes, where ``allocate`` would succeed already, where even packed blocks
        leave too little room, and always in the split layout, whose units every service can use.
        """
        moves = []
        names = list(self._services)
        for owner, source, target in self._store.compact(self._services[service].number, count):
            state = self._services[names[owner]]
            state.ref_counts[target] = state.ref_counts[source]
            state.ref_counts[source] = 0
            state.index.rename(source, target)
            moves.append(BlockMove(state.name, source, target))
        return moves or None

    def free(self, service: str, blocks: Sequence[int]) -> None:
        """Take one reference from each block of a table, in its order.

        Blocks without references become free; published ones stay cached, the last of the table being
        the first to be evicted, since a prefix is of no use without its beginning.

        Raises:
            IntegrityError: a block has no reference.
        """
        state = self._services[service]
        ref_counts = state.ref_counts
        published = state.index.hash_of
        if not published and [ref_counts[block] for block in blocks].count(1) == len(blocks):
            # No block is shared or published: all of them become free.
            for block in blocks:
                ref_counts[block] = 0
            state.num_live -= len(blocks)
            self._store.release(state.number, blocks[::-1])
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
            self._store.add_cached(state.number, cached, self._tick + 1)
            self._tick += len(cached)
        if unused:
            self._store.release(state.number, unused)

    def share(self, service: str, blocks: Sequence[int]) -> None:
        """Add one reference to each of these live blocks: a fork of their table.

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
        """Whether writing needs a copy first: others refer to the block, or may find it by its hash."""
        state = self._services[service]
        return state.ref_counts[block] > 1 or block in state.index.hash_of

    def match_prefix(self, service: str, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of ``hashes`` that is published; each gets a reference."""
        state = self._services[service]
        blocks = state.index.longest_prefix(hashes)
        for block in blocks:
            if state.ref_counts[block] == 0:
                state.index.remove_cached(block)
                self._store.remove_cached(state.number, block)
                state.num_live += 1
            state.ref_counts[block] += 1
        return blocks

    def publish(self, service: str, blocks: Sequence[int], hashes: Sequence[bytes]) -> int:
        """The content of live blocks is final and may serve other requests under these hashes, one each.

        A hash that another block has already stays with that block. Without prefix caching nothing happens.
        Returns how many blocks there are before the first that no other request can find.

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
        """Merged blocks (split: units) that this number of blocks takes up when packed."""
        view = self.layout.services[service]
        return -(-blocks // view.blocks_per_merged) * view.units_per_block

    def max_blocks(self, service: str) -> int:
        """Blocks that the service could hold if it had the whole pool."""
        view = self.layout.services[service]
        return self.capacity * view.blocks_per_merged // view.units_per_block

    def live_blocks(self, service: str) -> int:
        """Blocks with references."""
        return self._services[service].num_live

    def take_dirty(self) -> tuple[int, ...]:
        """Merged blocks (split: units) to zero before they are used, since the last call; asked once.

        They were last taken for another dtype, so that their old bits may read as NaN. A first use is not
        reported: the buffer starts with whatever the memory held, and what no step has written is never
        read into a result. Ask after the allocations of a step and before its forward pass: a later answer
        would wipe what the step wrote. Each call ends a step, as ``unit_ids`` understands it.
        """
        return self._store.take_dirty()

    def unit_ids(self, service: str, blocks: Sequence[int], *, before: bool = False) -> Units:
        """Split layout: the units of each block, int32 ``[len(blocks), units_per_block]``, a copy.

        Columns go by layer and then KV head (``LayerExtent.first_unit + head``); a unit starts at byte
        ``unit * layout.merged_bytes``. Valid while the blocks are live.

        before: as it was before the step that the last ``take_dirty`` ended; so a block that the step gave
        up, and perhaps handed out again with other units, is found where its content lies.

        Raises:
            ValueError: the pool has the merged layout, where a block's number is its address.
        """
        if self._split is None:
            raise ValueError("unit_ids is for the split layout; in the merged one use id * stride_bytes")
        return self._split.unit_ids(self._services[service].number, blocks, before)

    def usage(self) -> PoolUsage:
        """A snapshot of what the memory is used for."""
        services = {}
        for name, state in self._services.items():
            view = self.layout.services[name]
            services[name] = ServiceUsage(
                live_blocks=state.num_live,
                cached_blocks=len(state.index.cached),
                free_blocks=self._store.num_free_slots(state.number),
                merged_blocks=self._store.num_merged(state.number),
                block_bytes=view.held_block_bytes,
                token_bytes=view.shape.token_bytes(),
            )
        return PoolUsage(
            capacity=self.capacity,
            free_merged=self._store.free_merged,
            services=services,
            total_bytes=self.layout.total_bytes,
            live_bytes=sum(used.live_blocks * used.block_bytes for used in services.values()),
        )

    def check_integrity(self, tables: Mapping[str, Iterable[Sequence[int]]] | None = None) -> None:
        """Recompute the state from first principles: free + live + cached = total, everywhere.

        tables: all block tables in use, by service; where given, reference counts are compared with them.

        Raises:
            IntegrityError: naming what is off.
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
        self._store.check(live)

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
