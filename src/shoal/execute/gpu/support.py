"""Whether our Triton kernels run on a device, for models of a given shape."""

import torch

from shoal.execute.attention.kv_views import TORCH_DTYPES, LayerKV
from shoal.execute.current_device import on_device
from shoal.execute.gpu.kernels.decode import attend_decodes, plan_work
from shoal.execute.gpu.kernels.prompts import attend_prompts
from shoal.execute.gpu.kernels.store import store
from shoal.kvcache import KVShape, LayerShape

LARGEST_HEAD = 256
"""Largest size of a key or value that the kernels support, in elements."""


def can_attend(shape: KVShape) -> bool:
    """Whether the kernels support keys and values of this shape."""
    sizes = [size for layer in shape.layers for size in (layer.key_dim, layer.value_dim)]
    return max(sizes) <= LARGEST_HEAD


def smoke_test(shape: KVShape, device: torch.device) -> str | None:
    """Run the kernels once for each kind of layer; returns why they fail (no C compiler, an unsupported GPU),
    or None if they run."""
    try:
        with on_device(device):
            for layer in dict.fromkeys(shape.layers):
                _attend_two_tokens(layer, TORCH_DTYPES[shape.dtype], device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _attend_two_tokens(layer: LayerShape, dtype: torch.dtype, device: torch.device) -> None:
    heads = layer.kv_heads
    keys, values = (
        torch.zeros((1, 2, heads, size), dtype=dtype, device=device)
        for size in (layer.key_dim, layer.value_dim)
    )
    kv = LayerKV(keys, values, heads, keys.stride(2), values.stride(2), 0, 0)
    table = torch.zeros((1, 1, 1), dtype=torch.int32, device=device)
    rows = torch.zeros(2, dtype=torch.int32, device=device)
    store(keys[0], values[0], kv, table, rows, torch.arange(2, device=device))
    length = torch.full((1,), 2, dtype=torch.int32, device=device)
    work, out = plan_work(length, None, 1), torch.empty_like(values[0])
    attend_decodes(keys[0, :1], kv, table, rows[:1], work, scaling=None, softcap=None, out=out[:1])
    tile = torch.tensor([[0, 0, 2, 0]], dtype=torch.int32, device=device)
    attend_prompts(keys[0], kv, table, tile, scaling=None, window=None, softcap=None, out=out)
