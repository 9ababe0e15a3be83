"""Paged attention: the attention of a step over the KV pool, with torch's operations.

Every step first writes its new keys and values into the pool, then attends. Rows beyond a sequence's
length have arbitrary contents, possibly NaN; no backend lets them affect a result.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

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
from shoal.execute.batch import StepBatch

DECODE_GROUP_SPREAD = 0.6
"""Decoding rows share a padded gather if the shortest has at least this share of the longest's blocks."""


class PagedAttention(PackedQKV, ABC):
    """The attention of one step of one service; lives for one forward pass."""

    records_decodes = False
    """Whether steps of decodes may be recorded as CUDA graphs instead, which attend as this does."""

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        self.batch = batch
        self.cache = cache

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """See AttentionStep; ``extra`` was checked when the model was loaded."""


class GatheringStep(PagedAttention):
    """Copies keys and values out of the pool to attend them."""

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        super().__init__(batch, cache)
        counts = np.diff(batch.starts)
        positions = np.arange(batch.starts[-1]) + np.repeat(batch.firsts - batch.starts[:-1], counts)
        blocks = batch.tables[np.repeat(np.arange(len(counts)), counts), positions // cache.block_size]
        self._new_index = cache.index(blocks)
        self._new_offsets = torch.from_numpy(positions % cache.block_size).to(cache.device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """See AttentionStep."""
        del extra
        self.cache.write(layer, self._new_index, self._new_offsets, key, value)
        parts = self._parts(layer, query, key, value, window, scaling, softcap)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def _parts(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> list[torch.Tensor]:
        """The output in pieces, in the order of the tokens; the new keys and values are in the pool."""

    def _blocks(self, row: int, skipped: int = 0) -> np.ndarray:
        """The blocks of a row's sequence, without the first ``skipped``."""
        return self.batch.tables[row, skipped : -(-self.batch.ends[row] // self.cache.block_size)]


class ReferenceStep(GatheringStep):
    """The reference for tests: every row by itself, with textbook formulas in float32."""

    def _parts(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> list[torch.Tensor]:
        parts = []
        for row, (first, end) in enumerate(zip(self.batch.firsts, self.batch.ends, strict=True)):
            keys, values = self.cache.gather(layer, self.cache.index(self._blocks(row)))
            new = slice(self.batch.starts[row], self.batch.starts[row + 1])
            parts.append(
                _written_out(query[new], keys[:end], values[:end], int(first), window, scaling, softcap)
            )
        return parts


def _written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Textbook attention of queries at positions ``first``, ``first + 1``, ... over one sequence."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    k = keys.repeat_interleave(heads // kv_heads, dim=1).float()
    v = values.repeat_interleave(heads // kv_heads, dim=1).float()
    scores = torch.einsum("qhd,khd->hqk", query.float(), k)
    scores *= scaling if scaling is not None else query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    q_at = torch.arange(first, first + len(query), device=query.device)
    k_at = torch.arange(len(keys), device=query.device)
    scores = scores.masked_fill(~visible_keys(q_at, k_at, window), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype)


@dataclass(slots=True)
class _Gather:
    """What a group of decoding rows gathers."""

    index: torch.Tensor
    """Cache index of its blocks [rows * blocks]."""
    keys: int
    """How many of each row's gathered keys are kept."""
    blank: torch.Tensor | None
    """Gathered keys to set to 0; None: none."""
    mask: torch.Tensor | None
    """Additive mask [rows, 1, 1, keys]; None: everything is visible."""


class BatchedStep(GatheringStep):
    """Gathers and attends decoding rows together: fast without native kernels, correct on CUDA.

    Gathers and masks are planned once for each step and window, not for each layer.
    """

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        super().__init__(batch, cache)
        self._groups = _decode_groups(batch.ends[: batch.num_decodes], cache.block_size)
        self._gathers: dict[tuple[int, int | None], _Gather] = {}
        self._prefill_plans: dict[tuple[int, int | None], tuple[torch.Tensor, int, torch.Tensor | None]] = {}

    def _parts(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> list[torch.Tensor]:
        parts = self._decodes(layer, query[: self.batch.num_decodes], window, scaling, softcap)
        for row in range(self.batch.num_decodes, len(self.batch.firsts)):
            new = slice(self.batch.starts[row], self.batch.starts[row + 1])
            parts.append(
                self._prefill(layer, row, query[new], key[new], value[new], window, scaling, softcap)
            )
        return parts

    def _decodes(
        self,
        layer: int,
        query: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> list[torch.Tensor]:
        """The output of the rows that decode, in pieces."""
        return [self._decode(layer, rows, query[rows], window, scaling, softcap) for rows in self._groups]

    def _decode(
        self,
        layer: int,
        rows: slice,
        query: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        plan = self._gathers.get((rows.start, window))
        if plan is None:
            plan = self._gathers[rows.start, window] = self._plan_decode(rows, window)
        keys, values = self.cache.gather(layer, plan.index)
        if plan.blank is not None:
            keys.index_fill_(0, plan.blank, 0)
            values.index_fill_(0, plan.blank, 0)
        count = len(query)
        keys = keys.view(count, -1, *keys.shape[1:])[:, : plan.keys].to(query.dtype)
        values = values.view(count, -1, *values.shape[1:])[:, : plan.keys].to(query.dtype)
        return decode_attention(query, keys, values, plan.mask, scaling, softcap)

    def _plan_decode(self, rows: slice, window: int | None) -> _Gather:
        """Gather only blocks inside the window; blank and mask what lies beyond a row's context."""
        size, device, contexts = self.cache.block_size, self.cache.device, self.batch.ends[rows]
        skipped = np.maximum(contexts - window, 0) // size if window else np.zeros_like(contexts)
        blocks = -(-contexts // size)
        columns = skipped[:, None] + np.arange((blocks - skipped).max())
        columns = np.minimum(columns, blocks[:, None] - 1)  # behind a row's blocks its last one again
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
        return _Gather(self.cache.index(tables.ravel()), keys, blank, mask)

    def _prefill(
        self,
        layer: int,
        row: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        first, stop = int(self.batch.firsts[row]), int(self.batch.ends[row])
        if first == 0 and (window is None or stop <= window) and not self.cache.int8:
            return prefill_attention(query, key, value, None, scaling, softcap)
        plan = self._prefill_plans.get((row, window))
        if plan is None:
            plan = self._prefill_plans[row, window] = self._plan_prefill(row, first, stop, window)
        index, kept, mask = plan
        keys, values = self.cache.gather(layer, index)
        keys, values = keys[:kept].to(query.dtype), values[:kept].to(query.dtype)
        return prefill_attention(query, keys, values, mask, scaling, softcap)

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


def _decode_groups(contexts: np.ndarray, block_size: int) -> list[slice]:
    """Cut decoding rows, longest first, into groups with bounded padding."""
    needed = (-(-contexts // block_size)).tolist()
    groups, start = [], 0
    while start < len(needed):
        stop = start + 1
        while stop < len(needed) and needed[stop] >= DECODE_GROUP_SPREAD * needed[start]:
            stop += 1
        groups.append(slice(start, stop))
        start = stop
    return groups
