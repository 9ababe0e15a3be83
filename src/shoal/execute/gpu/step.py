"""The attention of one step on a GPU: new keys and values are stored, and all rows attended, in the KV pool.

Decodes and prompts of one step run the same way in both layouts of the pool, with or without a CUDA graph.
"""

from dataclasses import dataclass

import numpy as np
import torch

from shoal.execute.attention.kv_views import LayerKV, ServiceCache
from shoal.execute.attention.spec import AttentionSpec, PackedSpec
from shoal.execute.attention.torch_backends import PagedAttention
from shoal.execute.batch import StepBatch
from shoal.execute.gpu.kernels.decode import DecodeWork, attend_decodes, plan_work, programs_of
from shoal.execute.gpu.kernels.prompts import attend_prompts, prompt_tiles, tile_tokens
from shoal.execute.gpu.kernels.store import rotate_and_store, store
from shoal.execute.transfers import to_device


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a step with more than one token, on the host; they follow the decodes."""

    starts: np.ndarray
    """Index in the step of each row's first token, and the end: [rows + 1]."""
    firsts: np.ndarray
    """Position of each row's first token in its sequence [rows]."""
    table_rows: np.ndarray
    """Row of the tables of each row [rows]."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What kernels of a step read besides queries, keys and values; on the device but for the prompts."""

    positions: torch.Tensor
    """Position of each token in its sequence, int64 [tokens]."""
    table_rows: torch.Tensor
    """Row of ``tables`` of each token, int32 [tokens]; negative for padding."""
    lengths: torch.Tensor
    """Tokens of the sequence of each decode, with its new one, int32 [decodes]; 0 for padding.

    Decodes are the first tokens.
    """
    tables: torch.Tensor
    """Entries of the pool by block, int32 [table rows, blocks, entries of a block]."""
    prompts: PromptRows | None = None
    """None if all rows decode."""

    @classmethod
    def of(cls, batch: StepBatch, cache: ServiceCache) -> "StepInputs":
        """Inputs with the batch's own tables, one row for each row of the batch."""
        decodes, device = batch.num_decodes, cache.device
        rows = np.arange(len(batch.firsts))
        counts = np.diff(batch.starts)
        return cls(
            positions=batch.positions[0],
            table_rows=to_device(np.repeat(rows, counts).astype(np.int32), device),
            lengths=to_device(batch.ends[:decodes].astype(np.int32), device),
            tables=to_device(cache.entries(batch.tables).astype(np.int32), device),
            prompts=None
            if decodes == len(rows)
            else PromptRows(batch.starts[decodes:], batch.firsts[decodes:], rows[decodes:]),
        )


class DeviceStep:
    """An AttentionStep on a GPU, for one forward pass."""

    def __init__(self, inputs: StepInputs, cache: ServiceCache) -> None:
        self._inputs = inputs
        self._cache = cache
        self._work: dict[tuple[int | None, int], DecodeWork] = {}
        """By window and KV heads."""
        self._tiles: dict[int, torch.Tensor] = {}
        """By the number of tokens in a tile."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """See AttentionStep."""
        inputs, kv = self._inputs, self._cache.layer(layer)
        store(key, value, kv, inputs.tables, inputs.table_rows, inputs.positions)
        return self._attend(query, kv, spec)

    def attend_packed(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spec: PackedSpec
    ) -> torch.Tensor:
        """See AttentionStep."""
        inputs, kv = self._inputs, self._cache.layer(layer)
        query = rotate_and_store(
            qkv,
            kv,
            inputs.tables,
            inputs.table_rows,
            inputs.positions,
            heads=spec.heads,
            cos=cos,
            sin=sin,
            rotary_interleaved=spec.rotary_interleaved,
            q_scale=spec.q_scale,
            k_scale=spec.k_scale,
            norm_eps=spec.norm_eps,
        )
        return self._attend(query, kv, spec.attention).flatten(1)

    def _attend(self, query: torch.Tensor, kv: LayerKV, spec: AttentionSpec) -> torch.Tensor:
        """Attention output [tokens, heads, value_dim]; the new keys and values are in the pool."""
        inputs, (tokens, heads, _) = self._inputs, query.shape
        decodes = len(inputs.lengths)
        out = query.new_empty((tokens, heads, kv.values.shape[-1]))
        if decodes:
            attend_decodes(
                query[:decodes],
                kv,
                inputs.tables,
                inputs.table_rows[:decodes],
                self._work_of(kv, spec.window),
                scaling=spec.scaling,
                softcap=spec.softcap,
                out=out[:decodes],
            )
        if inputs.prompts is not None:
            tiles = self._tiles_of(inputs.prompts, tile_tokens(heads, kv))
            attend_prompts(
                query,
                kv,
                inputs.tables,
                tiles,
                scaling=spec.scaling,
                window=spec.window,
                softcap=spec.softcap,
                out=out,
            )
        return out

    def _work_of(self, kv: LayerKV, window: int | None) -> DecodeWork:
        """The work of the decodes, planned once for all layers with this window."""
        known = self._work.get((window, kv.kv_heads))
        if known is None:
            programs = programs_of(self._cache.device, kv.kv_heads)
            known = self._work[window, kv.kv_heads] = plan_work(self._inputs.lengths, window, programs)
        return known

    def _tiles_of(self, prompts: PromptRows, tokens: int) -> torch.Tensor:
        known = self._tiles.get(tokens)
        if known is None:
            tiles = prompt_tiles(prompts.starts, prompts.firsts, prompts.table_rows, tokens)
            known = self._tiles[tokens] = to_device(tiles, self._cache.device)
        return known


class TritonAttention(DeviceStep, PagedAttention):
    """The attention backend ``triton``: a DeviceStep from a batch with tables of its own."""

    captures_decodes = True

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        DeviceStep.__init__(self, StepInputs.of(batch, cache), cache)
