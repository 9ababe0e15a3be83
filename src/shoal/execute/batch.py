"""The packed batch of a step: token ids, positions and block tables, without padding.

Decode rows (one token) come first, longest sequence first; rows with more tokens follow. So decodes and
prompt chunks are one call of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.execute.attention.kv_views import ServiceCache
from shoal.execute.sequences import RunningSequence, SequenceTable


@dataclass(frozen=True, slots=True)
class StepBatch:
    input_ids: torch.Tensor
    """Token ids [1, tokens]."""
    positions: torch.Tensor
    """Position of each token in its sequence [1, tokens]."""
    starts: np.ndarray
    """Index of each row's first token in the batch, and the number of tokens at the end: int64 [rows + 1]."""
    firsts: np.ndarray
    """Position of each row's first token in its sequence, int64 [rows]."""
    tables: np.ndarray
    """Block tables up to the last token of the longest row, int64 [rows, blocks]. Entries beyond a row's own
    blocks repeat its first, so that every entry is a block of the service."""
    last: np.ndarray
    """Index in the batch of the last token of each row of the plan, int64 [rows]."""

    @property
    def ends(self) -> np.ndarray:
        """Tokens of each row's sequence after the step, int64 [rows]."""
        return self.firsts + np.diff(self.starts)

    @property
    def num_decodes(self) -> int:
        """Number of rows that compute one token; they come first."""
        return int((np.diff(self.starts) == 1).sum())


def build_batch(
    sequences: SequenceTable, rows: Sequence[RunningSequence], new_tokens: Sequence[int], cache: ServiceCache
) -> StepBatch:
    """Pack ``new_tokens[i]`` tokens of each of ``rows``; ``last`` has the order of ``rows``."""
    slots = np.array([row.slot for row in rows], dtype=np.int64)
    counts = np.array(new_tokens, dtype=np.int64)
    order = np.lexsort((-sequences.computed[slots], counts > 1))
    slots, counts = slots[order], counts[order]
    firsts = sequences.computed[slots]
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    ids: list[int] = []
    for row, first, count in zip(order.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        ids += rows[row].tokens[first : first + count]
    positions = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], counts)
    last = np.empty_like(order)
    last[order] = starts[1:] - 1
    needed = (firsts + counts - 1) // cache.block_size + 1
    width = int(needed.max())
    tables = sequences.tables[slots, :width]
    return StepBatch(
        input_ids=torch.tensor([ids], dtype=torch.int64, device=cache.device),
        positions=torch.from_numpy(positions).unsqueeze(0).to(cache.device),
        starts=starts,
        firsts=firsts,
        tables=np.where(np.arange(width) < needed[:, None], tables, tables[:, :1]),
        last=last,
    )
