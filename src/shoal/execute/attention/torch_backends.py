"""PagedAttention, the base class of attention backends, and the torch backends ``batched`` and ``reference``.

Each layer writes the step's new keys and values into the pool, then attends. Rows of the pool beyond a
sequence's length have arbitrary contents, possibly NaN; no backend may let them affect a result.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from shoal.execute.attention.kv_views import ServiceCache
from shoal.execute.attention.packed_qkv import PackedQKV
from shoal.execute.attention.sdpa import (
    additive_mask,
    decode_attention,
    prefill_attention,
    visible_keys,
)
from shoal.execute.attention.spec import AttentionSpec
from shoal.execute.batch import StepBatch

DECODE_GROUP_SPREAD = 0.6
"""Decode rows share a padded gather if the shortest has at least this share of the longest's blocks."""


class PagedAttention(PackedQKV, ABC):
    """The attention of one step of one service; used for one forward pass."""

    captures_decodes = False
    """Whether decode steps may be captured as CUDA graphs."""

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        self.batch = batch
        self.cache = cache

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """See AttentionStep."""


class GatheringAttention(PagedAttention):
    """Gathers keys and values out of the pool into contiguous tensors to attend them."""

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        super().__init__(batch, cache)
        counts = np.diff(batch.starts)
        positions = np.arange(batch.starts[-1]) + np.repeat(batch.firsts - batch.starts[:-1], counts)
        blocks = batch.tables[np.repeat(np.arange(len(counts)), counts), positions // cache.block_size]
        self._new_index = cache.index(blocks)
        self._new_offsets = torch.from_numpy(positions % cache.block_size).to(cache.device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self.cache.write(layer, self._new_index, self._new_offsets, key, value)
        parts = self._attend_rows(layer, query, key, value, spec)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def _attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> list[torch.Tensor]:
        """The output in pieces, in token order; the new keys and values are already in the pool."""

    def _blocks(self, row: int, skipped: int = 0) -> np.ndarray:
        """Blocks of a row's sequence, without the first ``skipped``."""
        return self.batch.tables[row, skipped : -(-self.batch.ends[row] // self.cache.block_size)]


class ReferenceAttention(GatheringAttention):
    """The backend ``reference``, for tests: each row separately, with textbook formulas in float32."""

    def _attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> list[torch.Tensor]:
        parts = []
        for row, (first, end) in enumerate(zip(self.batch.firsts, self.batch.ends, strict=True)):
            keys, values = self.cache.gather(layer, self.cache.index(self._blocks(row)))
            new = slice(self.batch.starts[row], self.batch.starts[row + 1])
            parts.append(_textbook_attention(query[new], keys[:end], values[:end], int(first), spec))
        return parts


def _textbook_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, spec: AttentionSpec
) -> torch.Tensor:
    """Textbook attention of queries at positions ``first``, ``first + 1``, ... over one sequence."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    k = keys.repeat_interleave(heads // kv_heads, dim=1).float()
    v = values.repeat_interleave(heads // kv_heads, dim=1).float()
    scores = torch.einsum("qhd,khd->hqk", query.float(), k)
    scores *= spec.scale(query.shape[-1])
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    q_at = torch.arange(first, first + len(query), device=query.device)
    k_at = torch.arange(len(keys), device=query.device)
    scores = scores.masked_fill(~visible_keys(q_at, k_at, spec.window), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype)


@dataclass(slots=True)
class _DecodeGather:
    """What a group of decode rows gathers."""

    index: torch.Tensor
    """Cache index of its blocks [rows * blocks]."""
    keys: int
    """Number of gathered keys of each row that are kept."""
    blank: torch.Tensor | None
    """Gathered keys to set to 0; None if there are none."""
    mask: torch.Tensor | None
    """Additive mask [rows, 1, 1, keys]; None if all keys are visible."""


class BatchedAttention(GatheringAttention):
    """The backend ``batched``: gathers and attends decode rows in groups, with torch operations.

    Gathers and masks are planned once for each step and window, not for each layer.
    """

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        super().__init__(batch, cache)
        self._groups = _group_decodes(batch.ends[: batch.num_decodes], cache.block_size)
        self._gathers: dict[tuple[int, int | None], _DecodeGather] = {}
        self._prefill_plans: dict[tuple[int, int | None], tuple[torch.Tensor, int, torch.Tensor | None]] = {}

    def _attend_rows(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> list[torch.Tensor]:
        parts = self._attend_decodes(layer, query[: self.batch.num_decodes], spec)
        for row in range(self.batch.num_decodes, len(self.batch.firsts)):
            new = slice(self.batch.starts[row], self.batch.starts[row + 1])
            parts.append(self._attend_prefill(layer, row, query[new], key[new], value[new], spec))
        return parts

    def _attend_decodes(self, layer: int, query: torch.Tensor, spec: AttentionSpec) -> list[torch.Tensor]:
        """The output of the decode rows, in pieces."""
        return [self._attend_group(layer, rows, query[rows], spec) for rows in self._groups]

    def _attend_group(
        self, layer: int, rows: slice, query: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        plan = self._gathers.get((rows.start, spec.window))
        if plan is None:
            plan = self._gathers[rows.start, spec.window] = self._plan_decode(rows, spec.window)
        keys, values = self.cache.gather(layer, plan.index)
        if plan.blank is not None:
            keys.index_fill_(0, plan.blank, 0)
            values.index_fill_(0, plan.blank, 0)
        count = len(query)
        keys = keys.view(count, -1, *keys.shape[1:])[:, : plan.keys].to(query.dtype)
        values = values.view(count, -1, *values.shape[1:])[:, : plan.keys].to(query.dtype)
        return decode_attention(query, keys, values, plan.mask, spec)

    def _plan_decode(self, rows: slice, window: int | None) -> _DecodeGather:
        """Gather only blocks inside the window; zero and mask keys beyond a row's context."""
        size, device, contexts = self.cache.block_size, self.cache.device, self.batch.ends[rows]
        skipped = np.maximum(contexts - window, 0) // size if window else np.zeros_like(contexts)
        blocks = -(-contexts // size)
        columns = skipped[:, None] + np.arange((blocks - skipped).max())
        columns = np.minimum(columns, blocks[:, None] - 1)  # padded with the last block
        tables = np.take_along_axis(self.batch.tables[rows], columns, axis=1)
        ends = contexts - skipped * size
        keys = int(ends.max())
        at = np.arange(tables.shape[1] * size)
        beyond = np.flatnonzero((at >= ends[:, None]).ravel())
        visible = at[:keys] < ends[:, None]
        if window:
            visible &= at[:keys] >= ends[:, None] - window
        mask = None
        if not visible.all():
            mask = additive_mask(torch.from_numpy(visible).to(device), self.cache.dtype)[:, None, None, :]
        blank = torch.from_numpy(beyond).to(device) if (ends != keys).any() else None
        return _DecodeGather(self.cache.index(tables.ravel()), keys, blank, mask)

    def _attend_prefill(
        self,
        layer: int,
        row: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        first, stop, window = int(self.batch.firsts[row]), int(self.batch.ends[row]), spec.window
        if first == 0 and (window is None or stop <= window) and not self.cache.int8:
            return prefill_attention(query, key, value, None, spec)
        plan = self._prefill_plans.get((row, window))
        if plan is None:
            plan = self._prefill_plans[row, window] = self._plan_prefill(row, first, stop, window)
        index, kept, mask = plan
        keys, values = self.cache.gather(layer, index)
        keys, values = keys[:kept].to(query.dtype), values[:kept].to(query.dtype)
        return prefill_attention(query, keys, values, mask, spec)

    def _plan_prefill(
        self, row: int, first: int, stop: int, window: int | None
    ) -> tuple[torch.Tensor, int, torch.Tensor | None]:
        size, device = self.cache.block_size, self.cache.device
        skipped = max(first - window + 1, 0) // size if window else 0
        begin = skipped * size
        q_at = torch.arange(first, stop, device=device)
        k_at = torch.arange(begin, stop, device=device)
        mask = additive_mask(visible_keys(q_at, k_at, window), self.cache.dtype)
        return self.cache.index(self._blocks(row, skipped)), stop - begin, mask


def _group_decodes(contexts: np.ndarray, block_size: int) -> list[slice]:
    """Split decode rows, longest first, into groups with bounded padding."""
    needed = (-(-contexts // block_size)).tolist()
    groups, start = [], 0
    while start < len(needed):
        stop = start + 1
        while stop < len(needed) and needed[stop] >= DECODE_GROUP_SPREAD * needed[start]:
            stop += 1
        groups.append(slice(start, stop))
        start = stop
    return groups
