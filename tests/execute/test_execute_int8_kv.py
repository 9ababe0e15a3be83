"""KV as int8: how it is rounded, and that attention computes with what was rounded, in any batch."""

import math

import numpy as np
import pytest
import torch
from attention_builders import Sequences, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from at_hand import on_cpu
from hypothesis_profiles import examples
from native_variants import each_variant
from shoal.execute.attention.int8_kv import as_bytes, dequantise, quantise
from shoal.execute.attention.native_backend import NativeAttention
from shoal.execute.attention.torch_backends import BatchedAttention, PagedAttention, ReferenceAttention
from shoal.native import NativeLibrary

TOLERANCE = {"float32": 5e-6, "bfloat16": 4e-3}
"""Largest relative difference (norm over norm) between attention over the same int8."""


def rounded(x: np.ndarray) -> tuple[np.ndarray, float]:
    """Up to 64 numbers that share a scale, by the specification: integers and the scale."""
    largest = np.abs(x).max() if np.isfinite(x).all() else np.nan
    scale = torch.tensor(np.float32(largest) / np.float32(127)).bfloat16().item()
    if math.isnan(scale) or scale < 2.0**-126:
        return np.zeros(len(x), np.int8), (scale if math.isnan(scale) else 0.0)
    quotients = x.astype(np.float32) / np.float32(scale)
    return np.rint(quotients).astype(np.int8), scale  # rint: ties to the even one


def read_back(x: torch.Tensor) -> np.ndarray:
    """Rows [tokens, kv_heads, dim] as they are after being stored, in float64."""
    flat = x.float().numpy().reshape(-1, x.shape[-1])
    rows = []
    for row in flat:
        groups = [rounded(row[at : at + 64]) for at in range(0, len(row), 64)]
        rows.append(np.concatenate([numbers * np.float64(scale) for numbers, scale in groups]))
    return np.array(rows).reshape(x.shape)


def expected(sequences: Sequences, number: int, first: int, end: int) -> np.ndarray:
    """Attention of tokens [first, end) of a sequence over rounded keys and values, in float64."""
    shape = sequences.shape
    query = sequences.queries[number][first:end].double().numpy()
    keys, values = (read_back(each[number][:end]) for each in (sequences.keys, sequences.values))
    out = np.empty((end - first, shape.heads, shape.value_dim))
    scaling = shape.key_dim**-0.5 if shape.scaling is None else shape.scaling
    for token, head in np.ndindex(end - first, shape.heads):
        own = head // (shape.heads // shape.kv_heads)
        begin = 0 if shape.window is None else max(0, first + token - shape.window + 1)
        seen = slice(begin, first + token + 1)
        scores = keys[seen, own] @ query[token, head] * scaling
        if shape.softcap is not None:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        weights = np.exp(scores - scores.max())
        out[token, head] = weights @ values[seen, own] / weights.sum()
    return out


def difference(a: torch.Tensor, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.double().numpy() - b) / np.linalg.norm(b))


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=examples(200))
@given(st.lists(numbers, min_size=1, max_size=150))
def test_numbers_are_rounded_as_specified(row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float32)
    integers, scales = quantise(x)
    back = dequantise(integers, as_bytes(scales))
    assert len(scales) == -(-len(row) // 64)
    for at, scale in zip(range(0, len(row), 64), scales.tolist(), strict=True):
        group = slice(at, at + 64)
        wanted, wanted_scale = rounded(x[group].numpy())
        assert integers[group].tolist() == wanted.tolist()
        assert scale == wanted_scale or (math.isnan(scale) and math.isnan(wanted_scale))
        if x[group].isfinite().all():
            error = (back[group].double() - x[group].double()).abs()
            assert (error <= max(scale / 2 * 1.0001, 127 * 2.0**-126)).all()
        else:
            assert back[group].isnan().all()


def test_zeros_stay_zeros_and_ties_go_to_the_even_number() -> None:
    integers, scale = quantise(torch.zeros(2, 80))
    assert not integers.any()
    assert not scale.any()
    integers, scale = quantise(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]))
    assert (integers.tolist(), scale.item()) == ([127, 0, 2, 2, 0, -2], 1.0)


shapes = st.builds(
    lambda kv_heads, group, **rest: Shape(kv_heads=kv_heads, heads=kv_heads * group, int8=True, **rest),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 7]),
    key_dim=st.sampled_from([8, 12, 17, 64, 80, 256]),
    value_dim=st.sampled_from([8, 16, 23, 64, 256]),
    window=st.sampled_from([None, None, 1, 9, 100, 300]),
    softcap=st.sampled_from([None, None, 2.0, 50.0]),
    scaling=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
steps = st.lists(
    st.tuples(st.sampled_from([0, 1, 5, 30, 255, 256, 300]), st.sampled_from([1, 1, 1, 2, 7, 40])),
    min_size=1,
    max_size=3,
)
"""Tokens computed before, and tokens of the step, of each sequence."""
layouts = st.sampled_from(["merged", "split"])


def check(
    step: type[PagedAttention],
    shape: Shape,
    rows: list[tuple[int, int]],
    layout: str,
    block_size: int,
    *more: object,
) -> None:
    """Tokens of a pool full of NaN are attended as expected; rows of one token come first, as in any step."""
    rows = sorted(rows, key=lambda row: row[1] > 1)
    sequences = Sequences(shape, [first + count for first, count in rows], layout, block_size, layers=2)
    sequences.store([first for first, _ in rows], layer=1)
    parts = [(number, first, first + count) for number, (first, count) in enumerate(rows)]
    out = sequences.attend(step(sequences.step(parts), sequences.cache, *more), parts, layer=1)
    wanted = np.concatenate([expected(sequences, *part) for part in parts])
    assert difference(out, wanted) < TOLERANCE[shape.dtype]


@each_variant
@settings(max_examples=examples(30), deadline=None)
@given(shapes, steps, layouts, st.sampled_from([1, 3, 16]))
def test_native_attention_reads_rounded_kv(
    native: NativeLibrary, shape: Shape, rows: list[tuple[int, int]], layout: str, block_size: int
) -> None:
    check(NativeAttention, shape, rows, layout, block_size, native)


@on_cpu
@pytest.mark.parametrize("step", [ReferenceAttention, BatchedAttention])
@settings(max_examples=examples(20), deadline=None)
@given(shapes, steps, layouts, st.sampled_from([1, 3, 16]))
def test_torch_attention_reads_rounded_kv(
    step: type[PagedAttention], shape: Shape, rows: list[tuple[int, int]], layout: str, block_size: int
) -> None:
    if step is BatchedAttention and shape.dtype == "bfloat16":
        shape.dtype = "float32"  # else it rounds what it gathers, and is less exact
    check(step, shape, rows, layout, block_size)


@each_variant
@pytest.mark.parametrize("layout", ["merged", "split"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_and_torch_store_the_same_bytes(native: NativeLibrary, layout: str, dtype: str) -> None:
    shape = Shape(kv_heads=3, heads=3, key_dim=20, value_dim=130, dtype=dtype, int8=True)
    lengths = [21, 5, 1]
    rows = [(number, 0, length) for number, length in enumerate(lengths)]
    stored = []
    for ours in (True, False):
        sequences = Sequences(shape, lengths, layout, block_size=4)
        sequences.keys[0][3, 1], sequences.values[0][4, 2] = 0.0, 1e-40
        sequences.keys[1][2, 0, 5], sequences.values[1][3, 1, 63] = math.inf, math.nan
        if ours:
            sequences.attend(NativeAttention(sequences.step(rows), sequences.cache, native), rows)
        else:
            sequences.store(lengths)
        stored.append(sequences.cache.rows.clone())
    assert torch.equal(*stored)


@each_variant
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_kv_that_is_not_finite_affects_only_later_tokens_of_its_sequence(
    native: NativeLibrary, part: str, wrong: float
) -> None:
    shape = Shape(heads=3, kv_heads=1, int8=True)
    sequences = Sequences(shape, [40, 9])
    getattr(sequences, part)[0][17, 0, 3] = wrong
    rows = [(0, 0, 40), (1, 0, 9)]
    out = sequences.attend(NativeAttention(sequences.step(rows), sequences.cache, native), rows)
    assert out[17:40].isnan().all()
    assert out[40:].isfinite().all()
    rows = [(0, 39, 40)]
    assert (
        sequences.attend(NativeAttention(sequences.step(rows), sequences.cache, native), rows).isnan().all()
    )
    assert sequences.attend(BatchedAttention(sequences.step(rows), sequences.cache), rows).isnan().all()
