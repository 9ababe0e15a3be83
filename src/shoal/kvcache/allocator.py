"""Interface of block allocators; tracking of the dtype last written to memory; IntegrityError."""

from collections.abc import Sequence
from typing import Protocol


class IntegrityError(AssertionError):
    """The pool's state is inconsistent, or a caller freed or shared a block without a reference."""


class BlockAllocator(Protocol):
    """Owner of the pool's memory: assigns merged blocks or units to the blocks of services.

    Services are identified by their index in the layout. A block is free, live (referenced), or cached (in
    its service's prefix index without references).
    """

    @property
    def free_merged(self) -> int:
        """Merged blocks (split: units) that no service holds."""

    def available(self, service: int) -> int:
        """Blocks that ``take`` can give now."""

    def available_after_eviction(self, service: int) -> int:
        """Blocks that ``take`` could give after evicting all cached blocks that may be evicted."""

    def take(self, service: int, count: int) -> list[int]:
        """Make ``count`` (at most ``available``) free blocks live."""

    def release(self, service: int, blocks: Sequence[int]) -> None:
        """Live blocks become free."""

    def add_cached(self, service: int, blocks: Sequence[int], tick: int) -> None:
        """Live blocks become cached at successive ticks, starting with ``tick``; ticks only increase."""

    def remove_cached(self, service: int, block: int) -> None:
        """A cached block becomes live."""

    def evict_lru(self, service: int, missing: int) -> None:
        """Evict the least recently used cached blocks to make up to ``missing`` blocks available.

        May evict fewer than needed; the caller then repeats the call.
        """

    def can_compact(self, service: int, count: int) -> bool:
        """Whether ``compact`` would find moves."""

    def compact(self, service: int, count: int) -> list[tuple[int, int, int]]:
        """Pack live blocks to make room for ``count`` more: (owner, source, target) of each move.

        Returns no moves, and changes nothing, if that is not needed or not possible. The caller moves
        references and hashes.
        """

    def take_dirty(self) -> tuple[int, ...]:
        """Merged blocks (split: units) whose dtype has changed since the last call."""

    def num_merged(self, service: int) -> int:
        """Merged blocks (split: units) that a service holds."""

    def num_free_slots(self, service: int) -> int:
        """Free blocks inside merged blocks that a service holds."""

    def check(self, live: Sequence[Sequence[int]]) -> None:
        """Compare the state with each service's live blocks; raises IntegrityError."""


class DtypeLog:
    """The dtype that each merged block was last used for, and the merged blocks in which it has changed.

    A first use never counts as a change: nothing was written there that could be read in the wrong dtype.
    """

    def __init__(self, size: int, dtypes: Sequence[str]) -> None:
        self.mixed = len(set(dtypes)) > 1
        """Whether there are, or have been, several dtypes."""
        self.dirty: dict[int, None] = {}
        """Merged blocks (as keys) whose dtype has changed since the last ``take_dirty``."""
        self._size = size
        self._dtypes = list(dtypes)
        self._last_dtype: list[str | None] = [None] * (size if self.mixed else 0)

    def change_services(self, dtypes: Sequence[str]) -> None:
        """``dtypes``: of the services from now on."""
        former = self._dtypes or list(dtypes)
        if not self.mixed and len({*former, *dtypes}) > 1:
            # Uses were not recorded until now, so all merged blocks count as used.
            self.mixed = True
            self._last_dtype = [former[0]] * self._size
        if dtypes:
            self._dtypes = list(dtypes)

    def record(self, service: int, merged_blocks: Sequence[int]) -> None:
        """``service`` takes these merged blocks."""
        if not self.mixed:
            return
        dtype = self._dtypes[service]
        for merged in merged_blocks:
            if self._last_dtype[merged] != dtype:
                if self._last_dtype[merged] is not None:
                    self.dirty[merged] = None
                self._last_dtype[merged] = dtype

    def take_dirty(self) -> tuple[int, ...]:
        """The merged blocks whose dtype has changed since the last call."""
        dirty = tuple(self.dirty)
        self.dirty.clear()
        return dirty
