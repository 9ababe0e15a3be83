"""The packed tokens of one step: what the model reads and where its KV is written.

Rows that compute one token come first and decode together; rows that compute more follow, and each is
prefilled by itself. So a step may have both kinds and is one call of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.execute.group import RunningSequence
from shoal.execute.kv_store import ServiceCache

DECODE_GROUP_SPREAD = 0.6
"""Decoding rows share a padded gather if the shortest has at least this share of the longest's blocks."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Neighbouring rows that decode in one padded call."""

    start: int
    """Their first token's position in the step."""
    stop: int
    """The position after their last token."""
    tables: np.ndarray
    """Block tables, int64 [rows, blocks], padded with the row's first block."""
    contexts: np.ndarray
    """Tokens that each row attends, including the new one, int64 [rows]."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One sequence that computes several tokens."""

    start: int
    """Its first token's position in the step."""
    stop: int
    """The position after its last token."""
    first: int
    """Its first token's position in the sequence."""
    blocks: np.ndarray
    """Its block table up to the last token."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The packed step."""

    input_ids: torch.Tensor
    """Token ids [1, tokens]."""
    positions: torch.Tensor
    """Their positions in their sequences [1, tokens]."""
    slot_index: torch.Tensor
    """Cache index of the block that each token's KV is written to."""
    slot_rows: torch.Tensor
    """The row of each token in that block [tokens]."""
    decodes: tuple[DecodeRows, ...]
    """Groups of rows that decode."""
    prefills: tuple[PrefillRow, ...]
    """Rows that compute several tokens."""
    last: dict[int, int]
    """The position in the step of the last token of each row of the plan."""


def build_batch(rows: Sequence[RunningSequence], new_tokens: Sequence[int], cache: ServiceCache) -> StepBatch:
    """Pack ``new_tokens[i]`` tokens of each of ``rows``; ``last`` is keyed by the row's index."""
    size = cache.block_size
    decoding = [i for i, n in enumerate(new_tokens) if n == 1]
    decoding.sort(key=lambda i: -rows[i].computed)
    prefilling = [i for i, n in enumerate(new_tokens) if n > 1]
    ids: list[int] = [rows[i].tokens[rows[i].computed] for i in decoding]
    positions: list[int] = [rows[i].computed for i in decoding]
    slots: list[int] = [rows[i].blocks[rows[i].computed // size] for i in decoding]
    last = {row: at for at, row in enumerate(decoding)}
    prefills = []
    for i in prefilling:
        row, start = rows[i], len(ids)
        stop = row.computed + new_tokens[i]
        ids.extend(row.tokens[row.computed : stop])
        positions.extend(range(row.computed, stop))
        blocks = np.array(row.blocks[: -(-stop // size)], dtype=np.int64)
        slots.extend(np.repeat(blocks, size)[row.computed : stop].tolist())
        prefills.append(PrefillRow(start, len(ids), row.computed, blocks))
        last[i] = len(ids) - 1
    where = np.array(positions, dtype=np.int64)
    return StepBatch(
        input_ids=torch.tensor([ids], dtype=torch.int64, device=cache.device),
        positions=torch.from_numpy(where).unsqueeze(0).to(cache.device),
        slot_index=cache.index(np.array(slots, dtype=np.int64)),
        slot_rows=torch.from_numpy(where % size).to(cache.device),
        decodes=tuple(_decode_groups([rows[i] for i in decoding], size)),
        prefills=tuple(prefills),
        last=last,
    )


def _decode_groups(rows: Sequence[RunningSequence], block_size: int) -> list[DecodeRows]:
    """Cut rows, longest first, into groups with bounded padding."""
    groups: list[DecodeRows] = []
    needed = [row.computed // block_size + 1 for row in rows]
    start = 0
    while start < len(rows):
        stop = start + 1
        while stop < len(rows) and needed[stop] >= DECODE_GROUP_SPREAD * needed[start]:
            stop += 1
        tables = np.empty((stop - start, needed[start]), dtype=np.int64)
        for at, (row, count) in enumerate(zip(rows[start:stop], needed[start:stop], strict=True)):
            tables[at, :count] = row.blocks[:count]
            tables[at, count:] = row.blocks[0]
        contexts = np.array([row.computed + 1 for row in rows[start:stop]], dtype=np.int64)
        groups.append(DecodeRows(start, stop, tables, contexts))
        start = stop
    return groups
