"""Triton kernels that store new keys and values in the KV pool, also from the merged QKV projection.

Importing this module needs `triton`, which CUDA builds of torch install.
"""

import torch
import triton
import triton.language as tl

from shoal.execute.attention.kv_views import LayerKV
from shoal.execute.gpu.kernels.sizes import cdiv, power_of_2

HEADS = 4
"""Heads that a program computes."""


def rotate_and_store(
    qkv: torch.Tensor,
    kv: LayerKV,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary_interleaved: bool,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    norm_eps: float,
) -> torch.Tensor:
    """Norm and rotate queries and keys, and store keys and values; returns the queries.

    The queries are contiguous, [tokens, heads, key_dim]. qkv: the output of the merged projection [tokens,
    (heads + kv_heads) * key_dim + kv_heads * value_dim]. tables: int32 [table rows, blocks, entries of a
    block]. table_rows: int32 [tokens], the row of ``tables`` of each token's sequence; negative for padding,
    of which nothing is stored. positions: int64 [tokens], in the sequences. The other arguments are as in
    ``AttentionStep.attend_packed``.
    """
    tokens, key_dim, value_dim = len(qkv), kv.keys.shape[-1], kv.values.shape[-1]
    query = torch.empty((tokens, heads, key_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return query
    qkv, cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (qkv, cos, sin))
    _rotate_and_store[(tokens, cdiv(heads, HEADS) + cdiv(kv.kv_heads, HEADS))](
        qkv,
        query,
        kv.keys,
        kv.values,
        tables,
        table_rows,
        positions,
        cos,
        sin,
        q_scale,
        k_scale,
        norm_eps,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        *_strides(kv, tables),
        heads,
        kv.kv_heads,
        kv.keys.shape[1],
        key_dim,
        value_dim,
        cos.shape[1],
        INTERLEAVED=rotary_interleaved,
        HEADS=HEADS,
        KEY_WIDTH=power_of_2(key_dim),
        VALUE_WIDTH=power_of_2(value_dim),
        enable_fp_fusion=False,
    )
    return query


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    kv: LayerKV,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Store key and value [tokens, kv_heads, dim]; the other arguments are as in ``rotate_and_store``."""
    tokens, key_dim, value_dim = len(key), key.shape[2], value.shape[2]
    if not tokens:
        return
    _store[(tokens, cdiv(kv.kv_heads, HEADS))](
        key,
        value,
        kv.keys,
        kv.values,
        tables,
        table_rows,
        positions,
        *key.stride(),
        *value.stride(),
        *_strides(kv, tables),
        kv.kv_heads,
        kv.keys.shape[1],
        key_dim,
        value_dim,
        HEADS=HEADS,
        KEY_WIDTH=power_of_2(key_dim),
        VALUE_WIDTH=power_of_2(value_dim),
    )


def _strides(kv: LayerKV, tables: torch.Tensor) -> tuple[int, ...]:
    """Locations of keys and values in the pool, in the order of the kernels' arguments."""
    return (
        kv.keys.stride(0),  # also of values, which are in the same entries
        kv.keys.stride(1),
        kv.key_head,
        kv.values.stride(1),
        kv.value_head,
        *tables.stride()[:2],
        kv.first_entry,
        kv.head_entry,
    )


# Arguments that differ between steps must not cause a recompilation.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table_rows", "positions"]
)
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv,
    query,
    keys,
    values,
    tables,
    table_rows,
    positions,
    cos,
    sin,
    q_scale,
    k_scale,
    eps,
    qkv_row,
    cos_row,
    sin_row,
    entry_stride,
    key_token,
    key_head,
    value_token,
    value_head,
    table_row,
    table_block,
    first_entry,
    head_entry,
    heads,
    kv_heads,
    block_size,
    key_dim,
    value_dim,
    rotated_dim,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Some query heads of one token, or some key heads and their values."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_parts = tl.cdiv(heads, HEADS)
    qkv += token * qkv_row
    cos += token * cos_row
    sin += token * sin_row
    at_key = tl.arange(0, KEY_WIDTH)
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        in_queries = (head < heads)[:, None] & (at_key < key_dim)[None, :]
        q = _rotated(qkv, q_scale, cos, sin, head, at_key, in_queries, eps, key_dim, rotated_dim, INTERLEAVED)
        tl.store(query + (token * heads + head)[:, None] * key_dim + at_key[None, :], q, mask=in_queries)
    else:
        head = (part - query_parts) * HEADS + tl.arange(0, HEADS)
        row = tl.load(table_rows + token)
        stored = (head < kv_heads) & (row >= 0)
        position = tl.load(positions + token).to(tl.int32)
        table = tables + row.to(tl.int64) * table_row + (position // block_size) * table_block
        entry = tl.load(table + first_entry + head * head_entry, mask=stored, other=0).to(tl.int64)
        offset = position % block_size
        in_keys = stored[:, None] & (at_key < key_dim)[None, :]
        new = qkv + heads * key_dim
        k = _rotated(new, k_scale, cos, sin, head, at_key, in_keys, eps, key_dim, rotated_dim, INTERLEAVED)
        place = entry * entry_stride + offset * key_token + head * key_head
        tl.store(keys + place[:, None] + at_key[None, :], k, mask=in_keys)
        at_value = tl.arange(0, VALUE_WIDTH)
        in_values = stored[:, None] & (at_value < value_dim)[None, :]
        new += kv_heads * key_dim
        v = tl.load(new + head[:, None] * value_dim + at_value[None, :], mask=in_values)
        place = entry * entry_stride + offset * value_token + head * value_head
        tl.store(values + place[:, None] + at_value[None, :], v, mask=in_values)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(  # type: ignore[no-untyped-def]
    x, scale, cos, sin, head, at, there, eps, dim, count, INTERLEAVED: tl.constexpr
):
    """Heads of ``dim`` elements [heads, dim], normed if there is a scale, their first ``count`` rotated."""
    dtype = x.dtype.element_ty
    if INTERLEAVED:
        partner, first = at ^ 1, at % 2 == 0
    else:
        first = at < count // 2
        partner = tl.where(first, at + count // 2, at - count // 2)
    in_pair = at < count
    partner = tl.where(in_pair, partner, at)
    one = tl.load(x + head[:, None] * dim + at[None, :], mask=there, other=0.0).to(tl.float32)
    other = tl.load(x + head[:, None] * dim + partner[None, :], mask=there, other=0.0).to(tl.float32)
    if scale is not None:
        factor = (1.0 / tl.sqrt(tl.sum(one * one, 1) / dim + eps))[:, None]
        inside = at < dim
        one_scale = tl.load(scale + at, mask=inside, other=0.0)[None, :]
        other_scale = tl.load(scale + partner, mask=inside, other=0.0)[None, :]
        one = (one * factor * one_scale).to(dtype).to(tl.float32)
        other = (other * factor * other_scale).to(dtype).to(tl.float32)
    c = tl.load(cos + at, mask=in_pair, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + at, mask=in_pair, other=0.0).to(tl.float32)[None, :]
    turned = one * c + tl.where(first[None, :], -other, other) * s
    return tl.where(in_pair[None, :], turned, one).to(dtype)


# Strides differ, too: some models give transposed tensors of all tokens.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_row", "new_key_token", "new_key_head", "new_value_token", "new_value_head"],
    do_not_specialize_on_alignment=["table_rows", "positions"],
)
def _store(  # type: ignore[no-untyped-def]
    new_keys,
    new_values,
    keys,
    values,
    tables,
    table_rows,
    positions,
    new_key_token,
    new_key_head,
    new_key_element,
    new_value_token,
    new_value_head,
    new_value_element,
    entry_stride,
    key_token,
    key_head,
    value_token,
    value_head,
    table_row,
    table_block,
    first_entry,
    head_entry,
    kv_heads,
    block_size,
    key_dim,
    value_dim,
    HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    row = tl.load(table_rows + token)
    stored = (head < kv_heads) & (row >= 0)
    position = tl.load(positions + token).to(tl.int32)
    table = tables + row.to(tl.int64) * table_row + (position // block_size) * table_block
    entry = tl.load(table + first_entry + head * head_entry, mask=stored, other=0).to(tl.int64)
    offset = position % block_size
    at = tl.arange(0, KEY_WIDTH)
    there = stored[:, None] & (at < key_dim)[None, :]
    new = new_keys + token * new_key_token + (head * new_key_head)[:, None] + at[None, :] * new_key_element
    place = entry * entry_stride + offset * key_token + head * key_head
    tl.store(keys + place[:, None] + at[None, :], tl.load(new, mask=there), mask=there)
    at = tl.arange(0, VALUE_WIDTH)
    there = stored[:, None] & (at < value_dim)[None, :]
    new = new_values + token * new_value_token + (head * new_value_head)[:, None]
    place = entry * entry_stride + offset * value_token + head * value_head
    tl.store(
        values + place[:, None] + at[None, :],
        tl.load(new + at[None, :] * new_value_element, mask=there),
        mask=there,
    )
