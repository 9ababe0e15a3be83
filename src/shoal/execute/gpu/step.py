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
from shoal.execute.gpu.kernels.prompts import attend_prompts, most_tiles, prompt_tiles, tile_tokens
from shoal.execute.gpu.kernels.store import rotate_and_store, store
from shoal.execute.transfers import to_device


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What kernels of a step read besides queries, keys and values; all of it on the device."""

    positions: torch.Tensor
    """Position of each token in its sequence, int64 [tokens]."""
    table_rows: torch.Tensor
    """Row of ``tables`` of each token, int32 [tokens]; negative for padding."""
    lengths: torch.Tensor
    """Tokens of the sequence of each decode, with its new one, int32 [decodes]; 0 for padding.

    Decodes are the first tokens. There may be as many lengths as tokens.
    """
    prompts: torch.Tensor
    """Rows with more than one token, behind the decodes: int32 [prompts, 4], as in ``prompt_tiles``."""
    tables: torch.Tensor
    """Entries of the pool by block, int32 [table rows, blocks, entries of a block]."""

    @classmethod
    def of(cls, batch: StepBatch, cache: ServiceCache) -> "StepInputs":
        """Inputs with the batch's own tables, one row for each row of the batch."""
        decodes, device = batch.num_decodes, cache.device
        rows = np.arange(len(batch.firsts))
        counts = np.diff(batch.starts)
        prompts = np.stack([rows, batch.starts[:-1], counts, batch.firsts], axis=1)[decodes:]
        return cls(
            positions=batch.positions[0],
            table_rows=to_device(np.repeat(rows, counts).astype(np.int32), device),
            lengths=to_device(batch.ends[:decodes].astype(np.int32), device),
            prompts=to_device(prompts.astype(np.int32), device),
            tables=to_device(cache.entries(batch.tables).astype(np.int32), device),
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
        """Attention output [tokens, heads, value_dim]; the new keys and values are in the pool.

        That of padding among the prompts' tokens is undefined.
        """
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
        if len(inputs.prompts):
            # Behind the decodes, which write 0 to tokens that are none.
            tiles = self._tiles_of(tile_tokens(heads, kv))
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

    def _tiles_of(self, tokens: int) -> torch.Tensor:
        """Tiles of the prompts with at most so many tokens, planned once for all layers."""
        known = self._tiles.get(tokens)
        if known is None:
            inputs = self._inputs
            capacity = most_tiles(len(inputs.positions), len(inputs.prompts), tokens)
            known = self._tiles[tokens] = prompt_tiles(inputs.prompts, tokens, capacity)
        return known


class TritonAttention(DeviceStep, PagedAttention):
    """The attention backend ``triton``: a DeviceStep from a batch with tables of its own."""

    captures_decodes = True

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        DeviceStep.__init__(self, StepInputs.of(batch, cache), cache)
