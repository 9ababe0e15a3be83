"""Blocks shared by several running requests of one service, so that memory forecasts count them once."""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.forecast import SharedBlocks


class SharedPrefixes:
    """Counts the requests that hold each shareable block.

    Blocks form a tree: a request that holds a block also holds the blocks before it. So along a block table
    the number of holders never rises, and adjacent blocks with equal numbers have the same holders.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._shared = 0  # blocks with at least two holders

    @property
    def any(self) -> bool:
        """Whether a block has at least two holders."""
        return self._shared > 0

    def hold(self, blocks: Sequence[int]) -> None:
        """One more request holds these blocks."""
        holders = self._holders
        for block in blocks:
            count = holders.get(block, 0) + 1
            holders[block] = count
            if count == 2:
                self._shared += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One request fewer holds these blocks."""
        holders = self._holders
        for block in blocks:
            left = holders[block] - 1
            if left:
                holders[block] = left
                if left == 1:
                    self._shared -= 1
            else:
                del holders[block]

    def rename(self, moved: Mapping[int, int]) -> None:
        """Rename blocks after a compaction."""
        holders = [(moved[block], count) for block, count in self._holders.items() if block in moved]
        for block in moved:
            self._holders.pop(block, None)
        self._holders.update(holders)

    def sets(self, tables: Sequence[tuple[Sequence[int], int]]) -> SharedBlocks | None:
        """Blocks held by at least two requests, given each one's block table and its shareable length."""
        if not self.any:
            return None
        holders = self._holders
        lengths: dict[int, int] = {}
        members: dict[int, list[int]] = {}
        for row, (table, shareable) in enumerate(tables):
            at = 0
            while at < shareable and holders[table[at]] > 1:
                first = table[at]
                if first not in lengths:
                    end = at + 1
                    while end < shareable and holders[table[end]] == holders[first]:
                        end += 1
                    lengths[first] = end - at
                    members[first] = []
                members[first].append(row)
                at += lengths[first]
        if not members:
            return None
        sizes = [len(rows) for rows in members.values()]
        return SharedBlocks(
            counts=np.array([lengths[first] for first in members]),
            members=np.array([row for rows in members.values() for row in rows]),
            starts=np.cumsum([0, *sizes[:-1]]),
        )
