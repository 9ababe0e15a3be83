"""Grouped-query attention over contiguous keys and values, by torch's ``scaled_dot_product_attention``.

The torch backends use it on gathered keys and values, the model probe on whole prompts. Keys and values are
not repeated in memory. Soft-capped scores are computed with explicit operations.
"""

import torch
import torch.nn.functional as F

from shoal.execute.attention.spec import AttentionSpec


def visible_keys(
    query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Which keys each query attends: bool [..., queries, keys] from [..., queries] and [..., keys]."""
    q, k = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
    visible = k <= q
    return visible if window is None else visible & (k > q - window)


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, minus infinity elsewhere."""
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill_(~visible, float("-inf"))


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Attention of one query per sequence.

    query [batch, heads, key_dim], key [batch, keys, kv_heads, key_dim], value [batch, keys, kv_heads,
    value_dim], mask additive [batch, 1, 1, keys] or None if all keys are visible. The query heads of a
    KV head are treated as several queries of that head. Returns [batch, heads, value_dim].
    """
    batch, heads, dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    out = _attend(grouped, key.transpose(1, 2), value.transpose(1, 2), mask, False, spec)
    return out.reshape(batch, heads, -1)


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Attention of several queries of one sequence.

    query [queries, heads, key_dim], key [keys, kv_heads, key_dim], value [keys, kv_heads, value_dim],
    mask additive [queries, keys]; None means causal with as many keys as queries. Returns
    [queries, heads, value_dim].
    """
    queries, heads, dim = query.shape
    kv_heads = key.shape[1]
    q = query.view(queries, kv_heads, heads // kv_heads, dim).permute(2, 1, 0, 3).unsqueeze(1)
    k, v = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    # The query heads of a KV head are attended one after the other. Repeating keys by a stride of 0 is
    # reported to give wrong results in torch's memory-efficient CUDA kernel if the number of keys is one
    # more than a multiple of 32 (pytorch/pytorch#191937).
    parts = [_attend(some, k, v, mask, mask is None, spec) for some in q]
    return torch.stack([part[0] for part in parts], dim=1).flatten(0, 1).transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    spec: AttentionSpec,
) -> torch.Tensor:
    if spec.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scaling)
    factor = spec.scale(q.shape[-1]) / spec.softcap
    scores = torch.tanh(torch.matmul(q, k.transpose(-2, -1)).float() * factor) * spec.softcap
    if causal:
        positions = torch.arange(q.shape[-2], device=q.device)
        mask = additive_mask(visible_keys(positions, positions, None), scores.dtype)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)
