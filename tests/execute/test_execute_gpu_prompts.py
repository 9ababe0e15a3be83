"""Attention of prompts in tiles is what the formulas say: on a GPU, or in Triton's interpreter."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from execute_builders import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_builders import BEYOND_INT32, TOLERANCE
from prompt_builders import Prompts
from strict_interpreter import strict_interpreter

from at_hand import DEVICE
from hypothesis_profiles import examples
from shoal.execute.attention.kv_views import LayerKV

if TYPE_CHECKING:
    from shoal.execute.gpu.kernels.prompts import TileShape

pytestmark = needs_triton

DTYPES = ["float32", "float16"] if DEVICE == "cpu" else list(TOLERANCE)
"""The interpreter of Triton 3.7 multiplies the bits of bfloat16 as if they were integers."""
LAYOUTS = pytest.mark.parametrize("layout", ["merged", "split"])
BEFORE, BEHIND = 2, 3
"""Tokens of a step that are not of its prompts."""


@pytest.fixture(scope="module", autouse=True)
def _strict() -> Iterator[None]:
    if DEVICE != "cpu":
        yield
        return
    with strict_interpreter():
        yield


def attend(case: Prompts, shape: "TileShape | None" = None, padding: Sequence[int] = ()) -> torch.Tensor:
    """The output of a case, whose tokens are in the midst of a step. padding: rows that are skipped."""
    from shoal.execute.gpu.kernels.prompts import attend_prompts, most_tiles, prompt_tiles, tile_tokens

    tokens, heads, _ = case.query.shape
    tables, order = case.in_other_rows()
    table_rows = order.cpu().numpy()
    table_rows[list(padding)] = -1
    size = shape.rows // case.group if shape else tile_tokens(heads, case.kv)
    rows = np.stack([table_rows, case.starts[:-1] + BEFORE, np.diff(case.starts), case.firsts], axis=1)
    in_step = torch.from_numpy(rows.astype(np.int32)).to(DEVICE)
    tiles = prompt_tiles(in_step, size, most_tiles(tokens, len(rows), size))
    whole = case.query.new_full((BEFORE + tokens + BEHIND, heads, case.value_dim), 7.0)
    query = case.query.new_full((BEFORE + tokens + BEHIND, heads, case.key_dim), torch.nan)
    if case.turned:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    query[BEFORE : BEFORE + tokens] = case.query
    attend_prompts(
        query,
        case.kv,
        tables,
        tiles,
        scaling=case.scaling,
        window=case.window,
        softcap=case.softcap,
        out=whole,
        shape=shape,
    )
    out = whole[BEFORE : BEFORE + tokens]
    others = torch.cat([whole[:BEFORE], whole[BEFORE + tokens :]])
    assert (others == 7.0).all(), "the output of other tokens was written"
    return out


def check(case: Prompts, shape: "TileShape | None" = None, padding: Sequence[int] = ()) -> None:
    expected = case.expected()
    for row in padding:
        expected[case.starts[row] : case.starts[row + 1]] = 7.0
    out = attend(case, shape, padding)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.dtype])


@settings(max_examples=examples(60), deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 5000), st.integers(-1, 50)), max_size=9),
    alike=st.booleans(),
    before=st.integers(0, 5),
    tokens_per_tile=st.integers(1, 130),
    padding=st.sampled_from([(0, 0), (1, 0), (2, 3)]),
)
def test_each_token_is_in_one_tile(
    prompts: list[tuple[int, int, int]],
    alike: bool,
    before: int,
    tokens_per_tile: int,
    padding: tuple[int, int],
) -> None:
    """The order is that of the number of keys, then of prompts. padding: prompts and tokens that are none."""
    from shoal.execute.gpu.kernels.prompts import most_tiles, prompt_tiles

    prompts = [prompts[0]] * len(prompts) if alike else prompts
    expected, rows, start = [], [], before
    for tokens, first, table_row in prompts:
        rows.append((table_row, start, tokens, first))
        for skipped in range(0, tokens, tokens_per_tile):
            size = min(tokens_per_tile, tokens - skipped)
            expected.append((table_row, start + skipped, size, first + skipped))
        start += tokens
    rows += [(0, 0, 0, 0)] * padding[0]
    in_step = torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(-1, 4)
    capacity = most_tiles(max(start - before, len(rows)) + padding[1], len(rows), tokens_per_tile)
    tiles = prompt_tiles(in_step, tokens_per_tile, capacity)
    assert (tiles.dtype, tiles.shape) == (torch.int32, (capacity, 4))
    found = [tuple(tile) for tile in tiles.tolist()]
    assert found[: len(expected)] == sorted(expected, key=lambda tile: -(tile[2] + tile[3]))
    assert all(row == -1 for row, _, _, _ in found[len(expected) :])


@st.composite
def prompts(draw: st.DrawFn, layout: str) -> Prompts:
    count = st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 70])
    before = st.sampled_from([0, 0, 1, 16, 63, 64, 65, 130])
    rows = draw(st.lists(st.tuples(before, count), min_size=1, max_size=3))
    return Prompts(
        firsts=[first for first, _ in rows],
        lengths=[first + tokens for first, tokens in rows],
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 20])),
        kv_heads=draw(st.integers(1, 2)),
        key_dim=draw(st.sampled_from([8, 16, 33, 64, 72, 128, 256])),
        value_dim=draw(st.sampled_from([8, 16, 33, 64, 72, 128, 256])),
        block_size=draw(st.sampled_from([1, 3, 16, 64])),
        layout=layout,
        window=draw(st.sampled_from([None, None, 1, 5, 20, 70, 300])),
        softcap=draw(st.sampled_from([None, None, 2.0, 30.0])),
        scaling=draw(st.sampled_from([None, 0.3])),
        dtype=draw(st.sampled_from(DTYPES)),
        gap=draw(st.sampled_from([0, 1, 8])),
        turned=draw(st.sampled_from([False, False, True])),
        forgets=True,
        seed=draw(st.integers(0, 3)),
    )


@LAYOUTS
@settings(max_examples=examples(75), deadline=None)
@given(data=st.data(), sizes=st.sampled_from([None, None, (16, 16), (64, 16), (32, 64), (128, 64)]))
def test_prompts_match_the_formulas(layout: str, data: st.DataObject, sizes: tuple[int, int] | None) -> None:
    from shoal.execute.gpu.kernels.prompts import TileShape

    case = data.draw(prompts(layout))
    padding = data.draw(st.sets(st.integers(0, len(case.lengths) - 1)))
    shape = None
    if sizes:
        rows, keys = sizes
        shape = TileShape(max(rows, 32 if case.group == 20 else 16), keys, num_warps=4)
    check(case, shape, sorted(padding))


@LAYOUTS
@pytest.mark.parametrize("window", [None, 150])
def test_prompts_behind_a_long_context(layout: str, window: int | None) -> None:
    """Several tiles of keys need no masks, beside others at the window's edge and on the diagonal."""
    check(Prompts(firsts=[290, 0], lengths=[330, 140], layout=layout, window=window, block_size=16))


@pytest.mark.parametrize("window", [None, 17, 24])
def test_tiles_of_keys_begin_and_end_anywhere(window: int | None) -> None:
    """The window's edge and the diagonal are at every place of a tile of keys."""
    from shoal.execute.gpu.kernels.prompts import TileShape

    rows = range(17)
    case = Prompts(
        firsts=[24 + row for row in rows],
        lengths=[25 + 2 * row for row in rows],
        window=window,
        group=1,
        kv_heads=1,
        block_size=16,
        forgets=True,
    )
    check(case, TileShape(rows=32, keys=16, num_warps=4))


@LAYOUTS
def test_extreme_scores(layout: str) -> None:
    check(Prompts(firsts=[60, 0], lengths=[80, 3], layout=layout, window=7, scaling=1000.0))


@LAYOUTS
def test_offsets_of_keys_may_exceed_32_bits(layout: str) -> None:
    try:
        case = Prompts(firsts=[9, 0], lengths=[40, 5], layout=layout, dtype="float16", unused=BEYOND_INT32)
    except (OSError, torch.OutOfMemoryError) as error:
        pytest.skip(f"there is no room for so large a pool: {error}")
    check(case)


def test_a_prompt_does_not_depend_on_others() -> None:
    """Bit for bit."""
    several = Prompts(firsts=[30, 7], lengths=[90, 41], block_size=16)
    alone = attend(several, padding=[1])[:60]
    assert torch.equal(attend(several)[:60], alone)


def test_steps_without_prompts() -> None:
    case = Prompts(firsts=[3], lengths=[3])
    assert attend(case).shape == (0, *case.query.shape[1:])


@pytest.mark.parametrize(
    ("dim", "dtype", "kilobytes", "expected"),
    [
        (128, torch.bfloat16, 227, (128, 128)),
        (256, torch.bfloat16, 227, (128, 64)),
        (128, torch.bfloat16, 99, (128, 64)),
        (256, torch.bfloat16, 163, (128, 32)),
        (256, torch.float16, 99, (64, 32)),
        (256, torch.float16, 64, (32, 16)),
        (128, torch.float32, 227, (32, 32)),
    ],
)
def test_tiles_fit_into_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    dtype: torch.dtype,
    kilobytes: int,
    expected: tuple[int, int],
) -> None:
    from shoal.execute.gpu.kernels import prompts as module

    monkeypatch.setattr(module, "shared_bytes", lambda device: kilobytes << 10)
    keys = torch.empty((1, 16, 2, dim), dtype=dtype)
    kv = LayerKV(keys, keys, 2, dim, dim, 0, 0)
    shape = module.tile_shape(6, kv)
    assert (shape.rows, shape.keys) == expected
    assert module.tile_tokens(6, kv) == shape.rows // 3
    assert module.tile_tokens(400, kv) == 1
