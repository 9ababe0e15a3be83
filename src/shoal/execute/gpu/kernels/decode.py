"""Paged attention of decode rows over a list of work items of similar length, as in flash decoding.

The list is made on the device, once for each step and window. A thread block takes one item and KV head, so
a long context among short ones does not take longer than the others together. A second kernel combines the
items of rows that have several.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shoal.execute.attention.kv_views import LayerKV
from shoal.execute.gpu.kernels.devices import multiprocessors
from shoal.execute.gpu.kernels.sizes import padded_width, power_of_2

SHORTEST_CHUNK = 256
"""Contexts of at most this many tokens are not divided."""
CHUNK_STEP = 64
"""All items of a row but its last have a multiple of this many tokens."""
PROGRAMS_PER_MULTIPROCESSOR = 4
KEYS = 64
"""Most keys that a thread block attends at once."""
TILE_BYTES = 16 << 10
"""Size limit of a tile of keys: shared memory holds several, and small GPUs have 64 KiB of it."""
NUM_WARPS = 4
NUM_STAGES = 3
"""Table entries are read two tiles ahead, and keys and values one."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_VECTOR = 256
"""Rows, or items, that a program of the planning kernel handles at once."""
_PARTS = 16
"""Items of a row that are combined at once."""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Work items of a decode step for one window. The tokens of a row's items are those that it attends."""

    items: torch.Tensor
    """int32 [capacity, 4]: row, first position, end position, and 1 if it is the only item of its row.

    Items are in the order of rows, and those of a row in the order of positions. Unused items are last and
    have row -1.
    """
    firsts: torch.Tensor
    """int32 [rows + 1]: index of each row's first item, and the number of items."""


def programs_of(device: torch.device, kv_heads: int) -> int:
    """Number of items that occupy a device, if each has a thread block for each KV head."""
    return max(1, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // kv_heads)


def plan_work(lengths: torch.Tensor, window: int | None, programs: int) -> DecodeWork:
    """Divide the attended tokens of all rows into about ``programs`` items.

    lengths: int32 [rows]. Rows of length 0 have no items. There is room for ``rows + programs`` items, which
    is always sufficient. Without host synchronisation; may be captured in a CUDA graph.
    """
    rows = len(lengths)
    capacity = rows + programs
    items = torch.empty((capacity, 4), dtype=torch.int32, device=lengths.device)
    firsts = torch.empty(rows + 1, dtype=torch.int32, device=lengths.device)
    _plan[(rows + 1,)](
        lengths,
        items,
        firsts,
        window or 0,
        rows,
        programs,
        capacity,
        SHORTEST=SHORTEST_CHUNK,
        STEP=CHUNK_STEP,
        VECTOR=_VECTOR,
        num_warps=1,
    )
    return DecodeWork(items, firsts)


def attend_decodes(
    query: torch.Tensor,
    kv: LayerKV,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    work: DecodeWork,
    *,
    scaling: float | None,
    softcap: float | None,
    out: torch.Tensor | None = None,
    keys: int | None = None,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> torch.Tensor:
    """Attention of one query per row over the tokens that ``work`` has for it: [rows, heads, value_dim].

    query: [rows, heads, key_dim]. tables: entries of the pool, int32 [table rows, blocks, entries of a
    block]. table_rows: int32 [rows], each row's place in ``tables``. Only attended keys and values, and their
    table entries, are read. Rows without items or with a negative table row get 0. out: what to write to and
    return, such as the first rows of a larger tensor; elements of a head must be adjacent. keys: how many
    are attended at once, a power of two of at least 16; by default as many as fit.
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    rows, heads, key_dim = query.shape
    value_dim, group = kv.values.shape[-1], heads // kv.kv_heads
    if out is None:
        out = torch.empty((rows, heads, value_dim), dtype=query.dtype, device=query.device)
    if not rows:
        return out
    capacity = len(work.items)
    key_width, value_width = padded_width(key_dim), padded_width(value_dim)
    fitting = TILE_BYTES // (max(key_width, value_width) * query.element_size())
    sums = torch.empty((capacity, heads, value_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((capacity, heads, 2), dtype=torch.float32, device=query.device)
    # Thread blocks of an item run at the same time: blocks of the pool have all its KV heads side by side.
    _attend_item[(kv.kv_heads, capacity)](
        query,
        kv.keys,
        kv.values,
        tables,
        table_rows,
        work.items,
        sums,
        stats,
        out,
        float(key_dim**-0.5 if scaling is None else scaling),
        float(softcap or 0.0),
        *query.stride()[:2],
        kv.keys.stride(0),  # also of values, which are in the same entries
        kv.keys.stride(1),
        kv.key_head,
        kv.values.stride(1),
        kv.value_head,
        *tables.stride()[:2],
        kv.first_entry,
        kv.head_entry,
        *out.stride()[:2],
        heads,
        GROUP=group,
        BLOCK_SIZE=kv.keys.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        ROWS=max(16, power_of_2(group)),
        KEYS=keys or max(16, min(KEYS, fitting)),
        SOFTCAPPED=bool(softcap),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    _combine_items[(rows, heads)](
        sums,
        stats,
        work.firsts,
        out,
        *out.stride()[:2],
        VALUE_DIM=value_dim,
        VALUE_WIDTH=value_width,
        PARTS=_PARTS,
        num_warps=4,
    )
    return out


# Arguments that differ between steps must not cause a recompilation.
@triton.jit(do_not_specialize=["window", "rows", "programs", "capacity"])  # type: ignore[untyped-decorator]
def _plan(  # type: ignore[no-untyped-def]
    lengths,
    items,
    firsts,
    window,
    rows,
    programs,
    capacity,
    SHORTEST: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Write the items of one row; the program after the last row's writes the unused items.

    Each program reads all lengths, which takes less time than another kernel would.
    """
    row = tl.program_id(0)
    sums = tl.zeros([VECTOR], tl.int64)
    for start in range(0, rows, VECTOR):
        at = start + tl.arange(0, VECTOR)
        sums += _attended(tl.load(lengths + at, mask=at < rows, other=0), window).to(tl.int64)
    fair = tl.cdiv(tl.cdiv(tl.sum(sums, 0), programs), STEP) * STEP
    chunk = tl.maximum(fair, SHORTEST).to(tl.int32)
    before = tl.zeros([VECTOR], tl.int32)
    for start in range(0, row, VECTOR):
        at = start + tl.arange(0, VECTOR)
        length = tl.load(lengths + at, mask=at < row, other=0)
        before += tl.cdiv(_attended(length, window), chunk)
    first = tl.sum(before, 0)
    tl.store(firsts + row, first)
    used = row < rows
    length = tl.load(lengths + row, mask=used, other=0)
    attended = _attended(length, window)
    begin = length - attended
    parts = tl.cdiv(attended, chunk)
    # Of similar length. The last one is not empty, because a share is at most a chunk.
    share = tl.cdiv(tl.cdiv(attended, tl.maximum(parts, 1)), STEP) * STEP
    count = tl.where(used, parts, capacity - first)
    for start in range(0, count, VECTOR):
        part = start + tl.arange(0, VECTOR)
        there = part < count
        item = items + (first + part) * 4
        tl.store(item, tl.where(used, row, -1) + part * 0, mask=there)
        tl.store(item + 1, begin + part * share, mask=there)
        tl.store(item + 2, tl.minimum(begin + (part + 1) * share, length), mask=there)
        tl.store(item + 3, (parts == 1).to(tl.int32) + part * 0, mask=there)


@triton.jit
def _attended(length, window):  # type: ignore[no-untyped-def]
    """How many tokens a row of this length attends."""
    return tl.where(window > 0, tl.minimum(length, window), length)


@triton.jit(do_not_specialize=["table_row", "out_row"])  # type: ignore[untyped-decorator]
def _attend_item(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    table_rows,
    items,
    sums,
    stats,
    out,
    scaling,
    softcap,
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
    out_row,
    out_head,
    heads,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    """Attend the queries of one row and KV head over the tokens of one item."""
    kv_head, item = tl.program_id(0), tl.program_id(1)
    row = tl.load(items + item * 4).to(tl.int64)
    if row < 0:
        return
    begin, end = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2)
    alone = tl.load(items + item * 4 + 3)
    place = tl.load(table_rows + row).to(tl.int64)
    end = tl.where(place < 0, begin, end)
    of_group = tl.arange(0, ROWS)
    at_key, at_value = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    head = kv_head * GROUP + of_group
    in_group = of_group < GROUP
    q = tl.load(
        query + row * query_row + head[:, None] * query_head + at_key[None, :],
        mask=in_group[:, None] & (at_key < KEY_DIM)[None, :],
        other=0.0,
    )
    table = tables + place * table_row + first_entry + kv_head * head_entry
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        there = at < end
        entry = tl.load(table + (at // BLOCK_SIZE) * table_block, mask=there, other=0).to(tl.int64)
        token = at % BLOCK_SIZE
        k = tl.load(
            keys + (entry * entry_stride + token * key_token)[:, None] + kv_head * key_head + at_key[None, :],
            mask=there[:, None] & (at_key < KEY_DIM)[None, :],
            other=0.0,
        )
        v = tl.load(
            values
            + (entry * entry_stride + token * value_token)[:, None]
            + kv_head * value_head
            + at_value[None, :],
            mask=there[:, None] & (at_value < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(there[None, :], log2_scores(scores, scaling, softcap, SOFTCAPPED), float("-inf"))
        # Never -inf: the first key of a tile is there.
        larger = tl.maximum(best, tl.max(scores, 1))
        factor = tl.exp2(best - larger)
        exps = tl.exp2(scores - larger[:, None])
        total = total * factor[:, None] + tl.dot(exps.to(v.dtype), v, input_precision="ieee")
        weight = weight * factor + tl.sum(exps, 1)
        best = larger
    written = in_group[:, None] & (at_value < VALUE_DIM)[None, :]
    if alone != 0:
        mean = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        to = out + row * out_row + head[:, None] * out_head + at_value[None, :]
        tl.store(to, mean.to(out.dtype.element_ty), mask=written)
    else:
        part = item.to(tl.int64) * heads + head
        tl.store(sums + part[:, None] * VALUE_DIM + at_value[None, :], total, mask=written)
        tl.store(stats + part * 2, best, mask=in_group)
        tl.store(stats + part * 2 + 1, weight, mask=in_group)


@triton.jit  # type: ignore[untyped-decorator]
def log2_scores(products, scaling, softcap, SOFTCAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of products of queries and keys, for softmax with ``exp2``."""
    if SOFTCAPPED:
        tanh = 2.0 * tl.sigmoid(products * (2.0 * scaling / softcap)) - 1.0
        scores = tanh * (softcap * LOG2_E)
    else:
        scores = products * (scaling * LOG2_E)
    return scores


@triton.jit(do_not_specialize=["out_row"])  # type: ignore[untyped-decorator]
def _combine_items(  # type: ignore[no-untyped-def]
    sums,
    stats,
    firsts,
    out,
    out_row,
    out_head,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Combine the items of one head of one row, unless the row has one, which wrote the output."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, end = tl.load(firsts + row), tl.load(firsts + row + 1)
    if end - first == 1:
        return
    at_value = tl.arange(0, VALUE_WIDTH)
    best = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    total = tl.zeros([VALUE_WIDTH], tl.float32)
    for start in range(first, end, PARTS):
        item = start + tl.arange(0, PARTS)
        there = item < end
        part = item.to(tl.int64) * heads + head
        bests = tl.load(stats + part * 2, mask=there, other=float("-inf"))
        weights = tl.load(stats + part * 2 + 1, mask=there, other=0.0)
        totals = tl.load(
            sums + part[:, None] * VALUE_DIM + at_value[None, :],
            mask=there[:, None] & (at_value < VALUE_DIM)[None, :],
            other=0.0,
        )
        larger = tl.maximum(best, tl.max(bests, 0))
        # All are -inf if the table row is negative.
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        factor, factors = tl.exp2(best - finite), tl.exp2(bests - finite)
        total = total * factor + tl.sum(totals * factors[:, None], 0)
        weight = weight * factor + tl.sum(weights * factors, 0)
        best = larger
    mean = total / tl.where(weight == 0.0, 1.0, weight)
    to = out + row.to(tl.int64) * out_row + head * out_head + at_value
    tl.store(to, mean.to(out.dtype.element_ty), mask=at_value < VALUE_DIM)
