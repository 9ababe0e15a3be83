"""Paged attention: the attention of a step over the KV pool.

Every step first writes its new keys and values into the pool, then attends. Rows beyond a sequence's
length have arbitrary contents, possibly NaN; no backend lets them affect a result.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.execute.attention_math import additive_mask, decode_attention, prefill_attention, visible_keys
from shoal.execute.batch import DecodeRows, PrefillRow, StepBatch
from shoal.execute.kv_store import ServiceCache


class PagedStep(ABC):
    """The attention of one step of one service; lives for one forward pass."""

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        self.batch = batch
        self.cache = cache

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
        del extra
        self.cache.write(layer, self.batch.slot_index, self.batch.slot_rows, key, value)
        parts = [
            self._decode(layer, rows, query[rows.start : rows.stop], window, scaling, softcap)
            for rows in self.batch.decodes
        ]
        for row in self.batch.prefills:
            new = slice(row.start, row.stop)
            parts.append(
                self._prefill(layer, row, query[new], key[new], value[new], window, scaling, softcap)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def _decode(
        self,
        layer: int,
        rows: DecodeRows,
        query: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor: ...

    @abstractmethod
    def _prefill(
        self,
        layer: int,
        row: PrefillRow,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor: ...

    def _context(self, layer: int, blocks: np.ndarray, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence's first ``tokens`` tokens."""
        keys, values = self.cache.gather(layer, self.cache.index(blocks))
        return keys[:tokens], values[:tokens]


class ReferenceStep(PagedStep):
    """The reference for tests: every row by itself, with textbook formulas in float32."""

    def _decode(
        self,
        layer: int,
        rows: DecodeRows,
        query: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        outputs = []
        for at, context in enumerate(rows.contexts.tolist()):
            blocks = rows.tables[at, : -(-context // self.cache.block_size)]
            keys, values = self._context(layer, blocks, context)
            outputs.append(
                _written_out(query[at : at + 1], keys, values, context - 1, window, scaling, softcap)
            )
        return torch.cat(outputs)

    def _prefill(
        self,
        layer: int,
        row: PrefillRow,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        keys, values = self._context(layer, row.blocks, row.first + len(query))
        return _written_out(query, keys, values, row.first, window, scaling, softcap)


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


class BatchedStep(PagedStep):
    """Gathers and attends decoding rows together: fast on CPUs, correct on CUDA.

    Gathers and masks are planned once for each step and window, not for each layer.
    """

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        super().__init__(batch, cache)
        self._gathers: dict[tuple[int, int | None], _Gather] = {}
        self._prefill_plans: dict[
            tuple[int, int | None], tuple[torch.Tensor, slice, torch.Tensor | None]
        ] = {}

    def _decode(
        self,
        layer: int,
        rows: DecodeRows,
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
        keys = keys.view(count, -1, *keys.shape[1:])[:, : plan.keys]
        values = values.view(count, -1, *values.shape[1:])[:, : plan.keys]
        return decode_attention(query, keys, values, plan.mask, scaling, softcap)

    def _plan_decode(self, rows: DecodeRows, window: int | None) -> _Gather:
        """Gather only blocks inside the window; blank and mask what lies beyond a row's context."""
        size, device = self.cache.block_size, self.cache.device
        skipped = np.maximum(rows.contexts - window, 0) // size if window else np.zeros_like(rows.contexts)
        counts = -(-rows.contexts // size) - skipped
        columns = skipped[:, None] + np.arange(counts.max())
        tables = np.take_along_axis(rows.tables, np.minimum(columns, rows.tables.shape[1] - 1), axis=1)
        ends = rows.contexts - skipped * size
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
        row: PrefillRow,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        stop = row.first + len(query)
        if row.first == 0 and (window is None or stop <= window):
            return prefill_attention(query, key, value, None, scaling, softcap)
        plan = self._prefill_plans.get((row.start, window))
        if plan is None:
            plan = self._prefill_plans[row.start, window] = self._plan_prefill(row, stop, window)
        index, kept, mask = plan
        keys, values = self.cache.gather(layer, index)
        return prefill_attention(query, keys[kept], values[kept], mask, scaling, softcap)

    def _plan_prefill(
        self, row: PrefillRow, stop: int, window: int | None
    ) -> tuple[torch.Tensor, slice, torch.Tensor | None]:
        size, device = self.cache.block_size, self.cache.device
        skipped = max(row.first - window + 1, 0) // size if window else 0
        begin = skipped * size
        q_at = torch.arange(row.first, stop, device=device)
        k_at = torch.arange(begin, stop, device=device)
        mask = additive_mask(visible_keys(q_at, k_at, window), self.cache.dtype)
        return self.cache.index(row.blocks[skipped:]), slice(0, stop - begin), mask


BACKENDS: dict[str, type[PagedStep]] = {"reference": ReferenceStep, "batched": BatchedStep}
"""Attention backends by the name that a user chooses."""
