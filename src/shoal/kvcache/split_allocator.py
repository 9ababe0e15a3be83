"""Block allocator of the split layout: every block is scattered over units of one layer and one KV head."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.kvcache.allocator import DtypeLog, IntegrityError
from shoal.kvcache.layout import PoolLayout
from shoal.kvcache.prefix import PrefixIndex

Units = npt.NDArray[np.int32]


class SplitAllocator:
    """Allocates blocks as rows of a service's table; each row has the units of the block.

    Any service can use any unit, so nothing is stranded. The cost is a table with layers x KV heads
    entries for every block, and as many scattered reads.
    """

    def __init__(self, layout: PoolLayout, indexes: Sequence[PrefixIndex]) -> None:
        views = list(layout.services.values())
        self._layout = layout
        self._indexes = indexes
        self._units_per_block = [view.units_per_block for view in views]
        num_rows = [layout.merged_blocks // per_block for per_block in self._units_per_block]
        self._free_units: Units = np.arange(layout.merged_blocks - 1, -1, -1, dtype=np.int32)
        self._free_count = layout.merged_blocks
        self._tables: list[Units] = [
            np.zeros((count, per_block), dtype=np.int32)
            for count, per_block in zip(num_rows, self._units_per_block, strict=True)
        ]
        self._free_rows = [list(range(count - 1, -1, -1)) for count in num_rows]
        self._overwritten: list[dict[int, Units]] = [{} for _ in num_rows]
        """By service: blocks whose rows were overwritten in this step, with their former units."""
        self._overwritten_before: list[dict[int, Units]] = [{} for _ in num_rows]
        """As ``_overwritten``, for the previous step."""
        self._dtypes = DtypeLog(layout.merged_blocks, [view.shape.dtype for view in views])

    @property
    def free_merged(self) -> int:
        """Units that no service holds."""
        return self._free_count

    def num_merged(self, service: int) -> int:
        """Units that a service holds."""
        used = len(self._tables[service]) - len(self._free_rows[service])
        return used * self._units_per_block[service]

    def num_free_slots(self, service: int) -> int:
        """Always 0: a unit belongs to one block."""
        return 0

    def unit_ids(self, service: int, blocks: Sequence[int], before: bool = False) -> Units:
        """Units of the given blocks, [blocks, units per block]; a copy. ``before``: see BlockPool."""
        units = self._tables[service][np.asarray(blocks, dtype=np.int64)]
        if before:
            former = self._overwritten_before[service]
            for row, block in enumerate(blocks):
                if block in former:
                    units[row] = former[block]
        return units

    def available(self, service: int) -> int:
        return self._free_count // self._units_per_block[service]

    def available_after_eviction(self, service: int) -> int:
        """Blocks available after evicting the cached blocks of all services."""
        cached = sum(
            len(index.cached) * per_block
            for index, per_block in zip(self._indexes, self._units_per_block, strict=True)
        )
        return (self._free_count + cached) // self._units_per_block[service]

    def take(self, service: int, count: int) -> list[int]:
        if not count:
            return []
        free_rows = self._free_rows[service]
        rows = free_rows[-count:]
        del free_rows[-count:]
        rows.reverse()
        per_block = self._units_per_block[service]
        top = self._free_count
        self._free_count = top - count * per_block
        units = self._free_units[self._free_count : top]
        overwritten, table = self._overwritten[service], self._tables[service]
        for row, former in zip(rows, table[rows], strict=True):
            overwritten.setdefault(row, former)
        table[rows] = units.reshape(count, per_block)
        if self._dtypes.mixed:
            self._dtypes.record(service, units.tolist())
        return rows

    def release(self, service: int, blocks: Sequence[int]) -> None:
        units = self._tables[service][np.asarray(blocks, dtype=np.int64)].ravel()
        self._free_units[self._free_count : self._free_count + len(units)] = units
        self._free_count += len(units)
        self._free_rows[service] += blocks

    def add_cached(self, service: int, blocks: Sequence[int], tick: int) -> None:
        """Nothing to do: cached blocks keep their units."""

    def remove_cached(self, service: int, block: int) -> None:
        """Nothing to do: cached blocks keep their units."""

    def evict_lru(self, service: int, missing: int) -> None:
        """Evict the least recently used cached block of any service; all services can use its units."""
        _, owner, block = min(
            (oldest[1], owner, oldest[0])
            for owner, index in enumerate(self._indexes)
            if (oldest := index.oldest()) is not None
        )
        self._indexes[owner].evict(block)
        self.release(owner, (block,))

    def can_compact(self, service: int, count: int) -> bool:
        """Always False: every service can use every unit."""
        return False

    def compact(self, service: int, count: int) -> list[tuple[int, int, int]]:
        """Never moves blocks: every service can use every unit."""
        return []

    def take_dirty(self) -> tuple[int, ...]:
        """Units whose dtype has changed since the last call; this ends a step."""
        self._overwritten_before = self._overwritten
        self._overwritten = [{} for _ in self._tables]
        return self._dtypes.take_dirty()

    def check(self, live: Sequence[Sequence[int]]) -> None:
        num_owners = np.zeros(self._layout.merged_blocks, dtype=np.int64)
        np.add.at(num_owners, self._free_units[: self._free_count], 1)
        for name, index, table, free_rows, blocks in zip(
            self._layout.services, self._indexes, self._tables, self._free_rows, live, strict=True
        ):
            used = [*blocks, *index.cached]
            all_rows = sorted([*used, *free_rows])
            if all_rows != list(range(len(table))):
                raise IntegrityError(f"{name}: a block is lost or in two states at once")
            if used:
                np.add.at(num_owners, table[used], 1)
        wrong = np.flatnonzero(num_owners != 1).tolist()
        if wrong:
            raise IntegrityError(
                f"units {wrong} are lost or belong to two blocks, which would overlap in bytes"
            )
