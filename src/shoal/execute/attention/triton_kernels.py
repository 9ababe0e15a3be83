"""Triton kernels for GPUs: paged attention of decode rows, and storing new keys and values in the KV pool.

The context of a row is split into parts, which thread blocks attend in parallel (as in flash decoding); a
second kernel combines them. Importing this module needs `triton`, which CUDA builds of torch install.
"""

import torch
import triton
import triton.language as tl

from shoal.execute.attention.kv_views import LayerKV

MAX_KEYS = 64
"""Most keys that a thread block attends at once."""
TILE_BYTES = 16 << 10
"""Size limit of a tile of keys: shared memory holds several, and small GPUs have 64 KiB of it."""
PROGRAMS = 512
"""Contexts are split into parts if there are fewer (row, KV head) pairs, to occupy a large GPU."""
MAX_PARTS = 32


def num_context_parts(rows: int, kv_heads: int) -> int:
    """Number of parts that each context is split into; independent of the lengths of contexts."""
    return max(1, min(MAX_PARTS, PROGRAMS // (rows * kv_heads)))


def attend_decodes(
    query: torch.Tensor,
    kv: LayerKV,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one query per row over its sequence's first ``lengths`` tokens: [rows, heads, value_dim].

    query: [rows, heads, key_dim]. tables: entries of the pool, as from ``ServiceCache.entries``, int32
    [rows, blocks, entries of a block]. lengths: int32 [rows]. Table entries beyond a row's length are not
    read. Rows of length 0 get 0.
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    rows, heads, key_dim = query.shape
    value_dim, group = kv.values.shape[-1], heads // kv.kv_heads
    parts = num_context_parts(rows, kv.kv_heads)
    key_width = max(16, triton.next_power_of_2(key_dim))
    value_width = max(16, triton.next_power_of_2(value_dim))
    fitting = TILE_BYTES // (max(key_width, value_width) * query.element_size())
    out = torch.empty((rows, heads, value_dim), dtype=query.dtype, device=query.device)
    sums = torch.empty((rows, heads, parts, value_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((rows, heads, parts, 2), dtype=torch.float32, device=query.device)
    _attend_part[(rows, kv.kv_heads, parts)](
        query,
        kv.keys,
        kv.values,
        tables,
        lengths,
        sums,
        stats,
        scaling if scaling is not None else key_dim**-0.5,
        softcap or 0.0,
        window or 0,
        query.stride(0),
        query.stride(1),
        kv.keys.stride(0),  # also of values, which are in the same entries
        kv.keys.stride(1),
        kv.key_head,
        kv.values.stride(1),
        kv.value_head,
        *tables.stride()[:2],
        kv.first_entry,
        kv.head_entry,
        heads,
        kv.keys.shape[1],
        key_dim,
        value_dim,
        group,
        parts,
        ROWS=max(16, triton.next_power_of_2(group)),
        KEYS=max(16, min(MAX_KEYS, fitting)),
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        SOFTCAPPED=bool(softcap),
    )
    _combine_parts[(rows, heads)](
        sums, stats, out, parts, value_dim, PARTS=triton.next_power_of_2(parts), VALUE_WIDTH=value_width
    )
    return out


def store_decodes(
    key: torch.Tensor, value: torch.Tensor, kv: LayerKV, tables: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Store the key and value of each row's last token in the pool; rows of length 0 store nothing.

    key, value: [rows, kv_heads, dim]. tables, lengths: as in ``attend_decodes``.
    """
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    for new, stored, stored_head in ((key, kv.keys, kv.key_head), (value, kv.values, kv.value_head)):
        _store_last[(len(new), kv.kv_heads)](
            new,
            stored,
            tables,
            lengths,
            *new.stride()[:2],
            *stored.stride()[:2],
            stored_head,
            *tables.stride()[:2],
            kv.first_entry,
            kv.head_entry,
            stored.shape[1],
            new.shape[2],
            WIDTH=triton.next_power_of_2(new.shape[2]),
        )


@triton.jit  # type: ignore[untyped-decorator]
def _store_last(  # type: ignore[no-untyped-def]
    new,
    stored,
    tables,
    lengths,
    new_row,
    new_head,
    entry_stride,
    token_stride,
    head_stride,
    table_row,
    table_block,
    first_entry,
    head_entry,
    block_size,
    dim,
    WIDTH: tl.constexpr,
):
    """Store the last token's key or value of one KV head of one row."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    last = tl.load(lengths + row) - 1
    at = tl.arange(0, WIDTH)
    there = (at < dim) & (last >= 0)
    table = tables + row.to(tl.int64) * table_row + first_entry + kv_head * head_entry
    entry = tl.load(table + (last // block_size) * table_block, mask=last >= 0, other=0).to(tl.int64)
    place = entry * entry_stride + (last % block_size) * token_stride + kv_head * head_stride
    x = tl.load(new + row.to(tl.int64) * new_row + kv_head * new_head + at, mask=there)
    tl.store(stored + place + at, x, mask=there)


# Arguments that differ between steps must not cause a recompilation.
@triton.jit(do_not_specialize=["table_row", "window", "parts"])  # type: ignore[untyped-decorator]
def _attend_part(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    lengths,
    sums,
    stats,
    scaling,
    softcap,
    window,
    query_row,
    query_head,
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
    block_size,
    key_dim,
    value_dim,
    group,
    parts,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    """Attend the queries of one row and KV head over one part of the context."""
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    begin = first // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(length - begin, parts), KEYS) * KEYS
    begin += part * share
    end = tl.minimum(begin + share, length)
    of_group = tl.arange(0, ROWS)
    at_key, at_value = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    head = kv_head * group + of_group
    in_group = of_group < group
    q = tl.load(
        query + row.to(tl.int64) * query_row + head[:, None] * query_head + at_key[None, :],
        mask=in_group[:, None] & (at_key < key_dim)[None, :],
        other=0.0,
    )
    table = tables + row.to(tl.int64) * table_row + first_entry + kv_head * head_entry
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        there = at < end
        entry = tl.load(table + (at // block_size) * table_block, mask=there, other=0).to(tl.int64)
        token = at % block_size
        k = tl.load(
            keys + (entry * entry_stride + token * key_token)[:, None] + kv_head * key_head + at_key[None, :],
            mask=there[:, None] & (at_key < key_dim)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if SOFTCAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        scores = tl.where((there & (at >= first))[None, :], scores, float("-inf"))
        # Never -inf: the first keys that are read include the begin of the window.
        larger = tl.maximum(best, tl.max(scores, 1))
        factor = tl.exp(best - larger)
        exps = tl.exp(scores - larger[:, None])
        v = tl.load(
            values
            + (entry * entry_stride + token * value_token)[:, None]
            + kv_head * value_head
            + at_value[None, :],
            mask=there[:, None] & (at_value < value_dim)[None, :],
            other=0.0,
        )
        total = total * factor[:, None] + tl.dot(exps.to(v.dtype), v, input_precision="ieee")
        weight = weight * factor + tl.sum(exps, 1)
        best = larger
    place = (row.to(tl.int64) * heads + head) * parts + part
    tl.store(
        sums + place[:, None] * value_dim + at_value[None, :],
        total,
        mask=in_group[:, None] & (at_value < value_dim)[None, :],
    )
    tl.store(stats + place * 2, best, mask=in_group)
    tl.store(stats + place * 2 + 1, weight, mask=in_group)


@triton.jit(do_not_specialize=["parts"])  # type: ignore[untyped-decorator]
def _combine_parts(  # type: ignore[no-untyped-def]
    sums, stats, out, parts, value_dim, PARTS: tl.constexpr, VALUE_WIDTH: tl.constexpr
):
    """Combine the parts of one head of one row; parts without keys have weight 0."""
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    part, at_value = tl.arange(0, PARTS), tl.arange(0, VALUE_WIDTH)
    there = part < parts
    best = tl.load(stats + (place * parts + part) * 2, mask=there, other=float("-inf"))
    weight = tl.load(stats + (place * parts + part) * 2 + 1, mask=there, other=0.0)
    largest = tl.max(best, 0)
    factor = tl.exp(best - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.load(
        sums + ((place * parts + part) * value_dim)[:, None] + at_value[None, :],
        mask=there[:, None] & (at_value < value_dim)[None, :],
        other=0.0,
    )
    weight = tl.sum(weight * factor, 0)
    summed = tl.sum(total * factor[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    tl.store(out + place * value_dim + at_value, summed.to(out.dtype.element_ty), mask=at_value < value_dim)
