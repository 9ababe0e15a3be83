"""Paged attention of prompts: tiles of new tokens attend keys and values where they lie in the KV pool.

A thread block takes one tile and KV head. Its rows are the queries of some consecutive tokens, with all
query heads of that KV head.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from shoal.execute.attention.kv_views import LayerKV
from shoal.execute.gpu.kernels.decode import log2_scores
from shoal.execute.gpu.kernels.devices import shared_bytes
from shoal.execute.gpu.kernels.sizes import padded_width, power_of_2

NUM_STAGES = 3
"""Table entries are read two tiles of keys ahead, and keys and values one."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a thread block computes a tile. rows: queries; keys: attended at once; both are powers of two."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int = NUM_STAGES


SHAPES = (
    TileShape(rows=128, keys=128, num_warps=8),
    TileShape(rows=128, keys=64, num_warps=8),
    TileShape(rows=128, keys=32, num_warps=8),
    TileShape(rows=64, keys=32, num_warps=4),
    TileShape(rows=32, keys=16, num_warps=4),
)
"""The first that fits into shared memory is taken."""
SHAPES_FLOAT32 = (TileShape(rows=32, keys=32, num_warps=4), TileShape(rows=32, keys=16, num_warps=4))
"""Of float32, for which there are no matrix units: products take many registers."""
_VECTOR = 128
"""Tiles that a program of the planning kernel handles at once."""


def tile_shape(heads: int, kv: LayerKV) -> TileShape:
    """The tile shape for layers like this one on their device."""
    widths = padded_width(kv.keys.shape[-1]), padded_width(kv.values.shape[-1])
    is_float32 = kv.keys.dtype == torch.float32
    return _tile_shape(
        heads // kv.kv_heads, *widths, kv.keys.element_size(), is_float32, shared_bytes(kv.keys.device)
    )


@cache
def _tile_shape(
    group: int, key_width: int, value_width: int, size: int, is_float32: bool, available_bytes: int
) -> TileShape:
    """size: of an element in bytes."""
    shapes = SHAPES_FLOAT32 if is_float32 else SHAPES
    fitting = (
        shape for shape in shapes if _needed_bytes(shape, key_width, value_width, size) <= available_bytes
    )
    found = next(fitting, shapes[-1])
    return TileShape(max(found.rows, power_of_2(group)), found.keys, found.num_warps, found.num_stages)


def _needed_bytes(shape: TileShape, key_width: int, value_width: int, size: int) -> int:
    """Upper limit of shared memory: a tile of queries, two of keys and of values, and table entries."""
    return size * (shape.rows * key_width + 2 * shape.keys * (key_width + value_width)) + 1024


def tile_tokens(heads: int, kv: LayerKV) -> int:
    """Most tokens of a tile for layers like this one: the ``tokens_per_tile`` of ``prompt_tiles``."""
    return tile_shape(heads, kv).rows // (heads // kv.kv_heads)


def most_tiles(tokens: int, prompts: int, tokens_per_tile: int) -> int:
    """Upper limit of the tiles of at most that many prompts, with at most ``tokens`` tokens in all."""
    return (tokens - prompts) // tokens_per_tile + prompts


def prompt_tiles(prompts: torch.Tensor, tokens_per_tile: int, capacity: int) -> torch.Tensor:
    """Tiles of the prompts of a step, for ``attend_prompts``: int32 [capacity, 4].

    prompts: int32 [prompts, 4], adjacent: the row of its block table, the index of its first token in the
    step, the number of its tokens (0 for padding), and the position of the first. A tile has the same four
    numbers, of a part of a prompt. Tiles with most keys are first, so that short ones fill the end of the
    kernel's time; unused ones are last and have row -1. capacity: at least ``most_tiles``. Without host
    synchronisation; may be captured in a CUDA graph.
    """
    tiles = torch.empty((capacity, 4), dtype=torch.int32, device=prompts.device)
    count = len(prompts)
    _plan_tiles[(count + 1,)](prompts, tiles, count, tokens_per_tile, capacity, VECTOR=_VECTOR, num_warps=1)
    return tiles


def attend_prompts(
    query: torch.Tensor,
    kv: LayerKV,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    shape: TileShape | None = None,
) -> None:
    """Causal attention of the tokens of all tiles; other tokens' output is left as it is.

    query: [tokens, heads, key_dim] of the step; keys and values of its tokens are in the pool. tables:
    entries of the pool, int32 [table rows, blocks, entries of a block]. tiles: from ``prompt_tiles``, on the
    device; one with a negative table row is skipped. out: [tokens, heads, value_dim], with adjacent elements
    of a head. Keys and values before the window or behind a tile's last token are not read. shape: by
    default ``tile_shape``; its rows must be sufficient for the tiles' tokens.
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    _, heads, key_dim = query.shape
    value_dim, group = kv.values.shape[-1], heads // kv.kv_heads
    shape = shape or tile_shape(heads, kv)
    if not len(tiles):
        return
    # Tiles of a KV head run at the same time, and find its keys and values in the L2 cache.
    _attend_tile[(len(tiles), kv.kv_heads)](
        query,
        kv.keys,
        kv.values,
        tables,
        tiles,
        out,
        float(key_dim**-0.5 if scaling is None else scaling),
        float(softcap or 0.0),
        window or 0,
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
        GROUP=group,
        BLOCK_SIZE=kv.keys.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_WIDTH=padded_width(key_dim),
        VALUE_WIDTH=padded_width(value_dim),
        ROWS=shape.rows,
        KEYS=shape.keys,
        WINDOWED=bool(window),
        SOFTCAPPED=bool(softcap),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


# Arguments that differ between steps must not cause a recompilation.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["count", "size", "capacity"], do_not_specialize_on_alignment=["prompts"]
)
def _plan_tiles(  # type: ignore[no-untyped-def]
    prompts, tiles, count, size, capacity, VECTOR: tl.constexpr
):
    """Write the tiles of one prompt; the program after the last prompt's writes the unused ones.

    size: tokens of a tile. The place of a tile is the number of tiles before it: those with more keys, and
    those of earlier prompts with as many.
    """
    prompt = tl.program_id(0)
    used = prompt < count
    row, start = _number(prompts, prompt, 0, used), _number(prompts, prompt, 1, used)
    tokens, first = _number(prompts, prompt, 2, used), _number(prompts, prompt, 3, used)
    for begin in range(0, tl.where(used, tl.cdiv(tokens, size), capacity), VECTOR):
        tile = begin + tl.arange(0, VECTOR)
        skipped = tile * size
        end = first + tl.minimum(skipped + size, tokens)
        before = tl.zeros([VECTOR], tl.int32)
        whole = 0
        for other in range(0, count):
            its_tokens = tl.load(prompts + other * 4 + 2)
            its_first = tl.load(prompts + other * 4 + 3)
            its_tiles = tl.cdiv(its_tokens, size)
            whole += its_tiles
            limit = tl.where(other < prompt, end - 1, end)
            not_before = tl.minimum(tl.maximum(limit - its_first, 0) // size, tl.maximum(its_tiles - 1, 0))
            before += tl.where(limit < its_first + its_tokens, its_tiles - not_before, 0)
        place = tl.where(used, before, whole + tile)
        there = tl.where(used, skipped < tokens, True) & (place < capacity)
        to = tiles + place * 4
        tl.store(to, tl.where(used, row, -1) + tile * 0, mask=there)
        tl.store(to + 1, start + skipped, mask=there)
        tl.store(to + 2, end - first - skipped, mask=there)
        tl.store(to + 3, first + skipped, mask=there)


@triton.jit
def _number(prompts, prompt, column, used):  # type: ignore[no-untyped-def]
    return tl.load(prompts + prompt * 4 + column, mask=used, other=0)


@triton.jit(do_not_specialize=["window", "table_row"])  # type: ignore[untyped-decorator]
def _attend_tile(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    tiles,
    out,
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
    out_row,
    out_head,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    """Attend the queries of one tile and KV head."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    place = tl.load(tiles + tile * 4).to(tl.int64)
    if place < 0:
        return
    start, tokens = tl.load(tiles + tile * 4 + 1).to(tl.int64), tl.load(tiles + tile * 4 + 2)
    first = tl.load(tiles + tile * 4 + 3)
    end = first + tokens
    token, head = tl.arange(0, ROWS) // GROUP, kv_head * GROUP + tl.arange(0, ROWS) % GROUP
    at_key, at_value = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    q = tl.load(
        query + ((start + token) * query_row + head * query_head)[:, None] + at_key[None, :],
        mask=(token < tokens)[:, None] & (at_key < KEY_DIM)[None, :],
        other=0.0,
    )
    table = tables + place * table_row + first_entry + kv_head * head_entry
    keys += kv_head * key_head + at_key[None, :]
    values += kv_head * value_head + at_value[None, :]
    # All queries attend all keys of [whole, whole_end). Only the others need masks.
    begin = 0
    whole = 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0)
        whole = begin + tl.cdiv(tl.maximum(end - window - begin, 0), KEYS) * KEYS
    whole_end = whole + tl.maximum(first + 1 - whole, 0) // KEYS * KEYS
    position = first + token
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    if WINDOWED:
        best, weight, total = _attend_keys(
            q,
            best,
            weight,
            total,
            position,
            keys,
            values,
            table,
            begin,
            tl.minimum(whole, end),
            end,
            scaling,
            softcap,
            window,
            entry_stride,
            key_token,
            value_token,
            table_block,
            BLOCK_SIZE,
            KEY_DIM,
            VALUE_DIM,
            KEY_WIDTH,
            VALUE_WIDTH,
            KEYS,
            True,
            WINDOWED,
            SOFTCAPPED,
        )
    best, weight, total = _attend_keys(
        q,
        best,
        weight,
        total,
        position,
        keys,
        values,
        table,
        whole,
        whole_end,
        end,
        scaling,
        softcap,
        window,
        entry_stride,
        key_token,
        value_token,
        table_block,
        BLOCK_SIZE,
        KEY_DIM,
        VALUE_DIM,
        KEY_WIDTH,
        VALUE_WIDTH,
        KEYS,
        False,
        WINDOWED,
        SOFTCAPPED,
    )
    best, weight, total = _attend_keys(
        q,
        best,
        weight,
        total,
        position,
        keys,
        values,
        table,
        whole_end,
        end,
        end,
        scaling,
        softcap,
        window,
        entry_stride,
        key_token,
        value_token,
        table_block,
        BLOCK_SIZE,
        KEY_DIM,
        VALUE_DIM,
        KEY_WIDTH,
        VALUE_WIDTH,
        KEYS,
        True,
        WINDOWED,
        SOFTCAPPED,
    )
    mean = total / tl.where(weight == 0.0, 1.0, weight)[:, None]  # 0 in rows without a token
    tl.store(
        out + ((start + token) * out_row + head * out_head)[:, None] + at_value[None, :],
        mean.to(out.dtype.element_ty),
        mask=(token < tokens)[:, None] & (at_value < VALUE_DIM)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _attend_keys(  # type: ignore[no-untyped-def]
    q,
    best,
    weight,
    total,
    position,
    keys,
    values,
    table,
    begin,
    stop,
    end,
    scaling,
    softcap,
    window,
    entry_stride,
    key_token,
    value_token,
    table_block,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
):
    """Attend the keys of [begin, stop) in addition; the new maxima, and sums of weights and values.

    Unless MASKED, all queries attend all of these keys, whose number is a multiple of KEYS.
    """
    for start in range(begin, stop, KEYS):
        at = start + tl.arange(0, KEYS)
        there = at < end
        entry = tl.load(table + (at // BLOCK_SIZE) * table_block, mask=there, other=0).to(tl.int64)
        token = at % BLOCK_SIZE
        k = tl.load(
            keys + (entry * entry_stride + token * key_token)[:, None],
            mask=there[:, None] & (tl.arange(0, KEY_WIDTH) < KEY_DIM)[None, :],
            other=0.0,
        )
        v = tl.load(
            values + (entry * entry_stride + token * value_token)[:, None],
            mask=there[:, None] & (tl.arange(0, VALUE_WIDTH) < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = log2_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), scaling, softcap, SOFTCAPPED)
        if MASKED:
            visible = at[None, :] <= position[:, None]
            if WINDOWED:
                visible &= at[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        finite = larger
        if MASKED and WINDOWED:  # the first keys may be before the windows of some tokens
            finite = tl.where(larger == float("-inf"), 0.0, larger)
        factor = tl.exp2(best - finite)
        exps = tl.exp2(scores - finite[:, None])
        total = total * factor[:, None] + tl.dot(exps.to(v.dtype), v, input_precision="ieee")
        weight = weight * factor + tl.sum(exps, 1)
        best = larger
    return best, weight, total
