"""Attention backend ``triton`` for GPUs: decodes read the KV pool in place, prompts gather from it."""

import numpy as np
import torch

from shoal.execute.attention.kv_views import TORCH_DTYPES, LayerKV, ServiceCache
from shoal.execute.attention.torch_backends import BatchedAttention
from shoal.execute.attention.triton_kernels import attend_decodes
from shoal.execute.batch import StepBatch
from shoal.execute.current_device import on_device
from shoal.kvcache import KVShape

LARGEST_HEAD = 256
"""Largest size of a key or value that the kernels support, in elements."""


def can_attend(shape: KVShape) -> bool:
    """Whether the kernels support keys and values of this shape."""
    sizes = [size for layer in shape.layers for size in (layer.key_dim, layer.value_dim)]
    return max(sizes) <= LARGEST_HEAD


def smoke_test(shape: KVShape, device: torch.device) -> str | None:
    """Run the kernels once; returns why they fail (no C compiler, an unsupported GPU), or None if they
    run."""
    dtype = TORCH_DTYPES[shape.dtype]
    layer = max(shape.layers, key=lambda layer: max(layer.key_dim, layer.value_dim))
    keys = torch.zeros((1, 1, layer.kv_heads, layer.key_dim), dtype=dtype, device=device)
    values = torch.zeros((1, 1, layer.kv_heads, layer.value_dim), dtype=dtype, device=device)
    kv = LayerKV(keys, values, layer.kv_heads, keys.stride(2), values.stride(2), 0, 0)
    table = torch.zeros((1, 1, 1), dtype=torch.int32, device=device)
    length = torch.ones(1, dtype=torch.int32, device=device)
    try:
        with on_device(device):
            attend_decodes(keys[0], kv, table, length, None, None, None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class TritonAttention(BatchedAttention):
    """Attends decodes of any lengths in one call per layer, without gathers and masks."""

    captures_decodes = True

    def __init__(self, batch: StepBatch, cache: ServiceCache) -> None:
        super().__init__(batch, cache)
        decodes = batch.num_decodes
        if not decodes:
            return
        entries = cache.entries(batch.tables[:decodes]).astype(np.int32)
        self._tables = torch.from_numpy(entries).to(cache.device)
        self._lengths = torch.from_numpy(batch.ends[:decodes].astype(np.int32)).to(cache.device)

    def _attend_decodes(
        self,
        layer: int,
        query: torch.Tensor,
        window: int | None,
        scaling: float | None,
        softcap: float | None,
    ) -> list[torch.Tensor]:
        if not len(query):
            return []
        kv = self.cache.layer(layer)
        return [attend_decodes(query, kv, self._tables, self._lengths, scaling, window, softcap)]
