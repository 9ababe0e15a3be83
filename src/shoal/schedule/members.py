"""What stays the same of running requests, as columns of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.forecast import SharedBlocks
from shoal.schedule.tracked import Tracked

IntArray = npt.NDArray[np.int64]

MEMBER_ROWS = 4
"""Rows of ``Members.table``."""


@dataclass(frozen=True)
class Members:
    """What does not change while the same requests run: one column each, in one order.

    table: rows of prompt tokens, of most output tokens, of the keys of forecasts (their 64 bits as a signed
    number), and of output tokens where known beforehand, otherwise the most [4, n]. shared: blocks that
    several of them hold.
    """

    table: IntArray
    shared: SharedBlocks | None

    @classmethod
    def of(cls, requests: Sequence[Tracked], shared: SharedBlocks | None) -> "Members":
        """The columns of ``requests``."""
        table = np.array([member_column(one) for one in requests], dtype=np.int64)
        return cls(table.reshape(len(requests), MEMBER_ROWS).T, shared)

    @property
    def prompts(self) -> IntArray:
        """Prompt tokens."""
        prompts: IntArray = self.table[0]
        return prompts

    @property
    def ceilings(self) -> IntArray:
        """Most output tokens."""
        ceilings: IntArray = self.table[1]
        return ceilings

    @property
    def seeds(self) -> npt.NDArray[np.uint64]:
        """Keys of forecasts."""
        seeds: npt.NDArray[np.uint64] = self.table[2].view(np.uint64)
        return seeds

    @property
    def truths(self) -> IntArray:
        """Output tokens where known beforehand, otherwise the most."""
        truths: IntArray = self.table[3]
        return truths

    def without(self, row: int) -> "Members":
        """These without one."""
        shared = None if self.shared is None else self.shared.without(row)
        return Members(np.delete(self.table, row, axis=1), shared)


def member_column(one: Tracked) -> tuple[int, int, int, int]:
    """A request's column in ``Members.table``."""
    seed = one.seed
    signed = seed - (1 << 64) if seed >> 63 else seed
    return one.prompt_tokens, one.ceiling, signed, one.last_token - one.prompt_tokens
