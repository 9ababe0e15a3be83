"""Native attention: every instruction set computes what the reference does, whatever else is in the step."""

import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from attention_builders import Sequences, Shape
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_to_neighbours
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_to_halves

from hypothesis_profiles import examples
from native_variants import each_variant
from shoal.core import ConfigError
from shoal.execute.attention.kv_views import TORCH_DTYPES
from shoal.execute.attention.native_backend import NativeAttention
from shoal.execute.attention.selector import check_backend, choose_backend
from shoal.execute.attention.spec import PackedSpec
from shoal.execute.attention.torch_backends import BatchedAttention, ReferenceAttention
from shoal.kvcache import KVShape, LayerShape
from shoal.native import NativeLibrary, load_native

CPU = torch.device("cpu")
TOLERANCE = {"float32": 5e-6, "bfloat16": 4e-3}
"""Largest relative difference (norm over norm): rounding of scores in float32, of the output in bfloat16."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of zeros, whose signs ``torch.equal`` does not tell apart."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


shapes = st.builds(
    lambda kv_heads, group, **rest: Shape(kv_heads=kv_heads, heads=kv_heads * group, **rest),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    key_dim=st.sampled_from([8, 12, 16, 17, 64, 80, 128, 256]),
    value_dim=st.sampled_from([8, 16, 23, 64, 256]),
    window=st.sampled_from([None, None, 1, 9, 100, 300]),
    softcap=st.sampled_from([None, None, 2.0, 50.0]),
    scaling=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
rows = st.lists(
    st.tuples(st.sampled_from([0, 1, 5, 30, 255, 256, 600]), st.sampled_from([1, 1, 1, 2, 7, 40])),
    min_size=1,
    max_size=4,
)
"""Tokens computed before, and tokens of the step, of each sequence."""


@each_variant
@settings(max_examples=examples(50))
@given(shapes, rows, st.sampled_from(["merged", "split"]), st.sampled_from([1, 3, 16]), st.integers(0, 99))
def test_every_instruction_set_matches_the_reference(
    native: NativeLibrary, shape: Shape, rows: list[tuple[int, int]], layout: str, block_size: int, seed: int
) -> None:
    ends = [first + count for first, count in rows]
    sequences = Sequences(shape, ends, layout, block_size, layers=2, seed=seed)
    sequences.store([first for first, _ in rows], layer=1)
    parts = [(number, first, first + count) for number, (first, count) in enumerate(rows)]
    batch = sequences.step(parts)
    ours = sequences.attend(NativeAttention(batch, sequences.cache, native), parts, layer=1)
    theirs = sequences.attend(ReferenceAttention(batch, sequences.cache), parts, layer=1)
    assert difference(ours, theirs) < TOLERANCE[shape.dtype]


@each_variant
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tiny", [False, True])
def test_a_token_gets_the_same_bits_in_any_batch_chunk_and_number_of_threads(
    native: NativeLibrary, dtype: str, window: int | None, int8: bool, tiny: bool, threads: int
) -> None:
    shape = Shape(heads=6, kv_heads=2, window=window, dtype=dtype, int8=int8, scaling=4.0 if tiny else None)
    lengths = (3, 300, 610)
    sequences = Sequences(shape, lengths, block_size=16)
    if tiny:  # peaked weights, and values of which many are 0 or nearly so
        sizes = torch.tensor([0.0, 1e-38, 1e-30, 1.0])
        for values in sequences.values:
            values *= sizes[torch.randint(4, values.shape)].to(values.dtype)
    whole = []
    for number, length in enumerate(lengths):
        row = [(number, 0, length)]
        whole.append(sequences.attend(NativeAttention(sequences.step(row), sequences.cache, native), row))
    chance = random.Random(0)
    for _ in range(4):
        done = [0] * len(lengths)
        while left := [number for number, length in enumerate(lengths) if done[number] < length]:
            rows = []
            for number in chance.sample(left, chance.randint(1, len(left))):
                count = min(chance.choice([1, 2, 33, 150]), lengths[number] - done[number])
                rows.append((number, done[number], done[number] + count))
                done[number] += count
            out = sequences.attend(NativeAttention(sequences.step(rows), sequences.cache, native), rows)
            assert same_bits(out, sequences.of_step(whole, rows))


@each_variant
def test_many_rows_share_tasks_and_give_the_same_bits(native: NativeLibrary, threads: int) -> None:
    shape = Shape(heads=6, kv_heads=3)
    sequences = Sequences(shape, [2 + 13 * number for number in range(40)], block_size=8)
    sequences.store([length - 1 for length in sequences.lengths])
    rows = [(number, length - 1, length) for number, length in enumerate(sequences.lengths)]
    together = sequences.attend(NativeAttention(sequences.step(rows), sequences.cache, native), rows)
    for number, row in enumerate(rows):
        alone = sequences.attend(NativeAttention(sequences.step([row]), sequences.cache, native), [row])
        assert torch.equal(together[number], alone[0])


def packed(sequences: Sequences, rows: list[tuple[int, int, int]]) -> torch.Tensor:
    """Projections of a step as one tensor, in the middle of a wider one."""
    parts = [sequences.of_step(each, rows).flatten(1) for each in (sequences.queries, sequences.keys)]
    values = sequences.of_step(sequences.values, rows).flatten(1)
    wider = torch.cat([*parts, values, torch.zeros(len(values), 5).to(values.dtype)], dim=1)
    return wider[:, :-5]


def normed(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * scale


@each_variant
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("key_dim", "rotary_dim"), [(64, 64), (80, 32), (20, 20)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_packed_projections_are_normed_rotated_stored_and_attended(
    native: NativeLibrary, dtype: str, interleaved: bool, key_dim: int, rotary_dim: int, with_norm: bool,
    int8: bool,
) -> None:  # fmt: skip
    shape = Shape(heads=6, kv_heads=2, key_dim=key_dim, value_dim=24, window=9, dtype=dtype, int8=int8)
    ours = Sequences(shape, [11, 4, 1], layers=2)
    rows = [(0, 0, 11), (1, 0, 4), (2, 0, 1)]
    batch = ours.step(rows)
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand((16, rotary_dim // 2), generator=generator) * 6
    angles = angles.repeat_interleave(2, dim=1) if interleaved else torch.cat([angles, angles], dim=1)
    cos, sin = angles.cos().to(TORCH_DTYPES[dtype]), angles.sin().to(TORCH_DTYPES[dtype])
    scales = torch.rand((2, key_dim), generator=generator) + 0.5 if with_norm else (None, None)
    spec = PackedSpec(
        heads=6, shape=shape.layer_shape, rotary_interleaved=interleaved, q_scale=scales[0],
        k_scale=scales[1], norm_eps=1e-5, attention=shape.spec,
    )  # fmt: skip
    out = NativeAttention(batch, ours.cache, native).attend_packed(1, packed(ours, rows), cos, sin, spec)

    query, key = (ours.of_step(each, rows).float() for each in (ours.queries, ours.keys))
    if with_norm:
        query, key = normed(query, scales[0], 1e-5), normed(key, scales[1], 1e-5)
    apply = apply_to_neighbours if interleaved else apply_to_halves
    turned = apply(
        query[None, ..., :rotary_dim], key[None, ..., :rotary_dim], *angle_rows(cos, sin, interleaved),
        unsqueeze_dim=2,
    )  # fmt: skip
    query[..., :rotary_dim], key[..., :rotary_dim] = turned[0][0], turned[1][0]
    theirs = Sequences(shape, [11, 4, 1], layers=2)
    theirs_step = ReferenceAttention(theirs.step(rows), theirs.cache)
    value = theirs.of_step(theirs.values, rows)
    as_stored = TORCH_DTYPES[dtype]
    expected = theirs_step.attend(
        1, query.to(as_stored), key.to(as_stored), value, shape.spec
    ).flatten(1)  # fmt: skip
    assert out.shape == expected.shape
    # A key that is rounded elsewhere may become another integer now and then.
    assert difference(out, expected) < (1e-2 if int8 else TOLERANCE[dtype])


def angle_rows(cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as the functions of `transformers` want them: [1, tokens, rotary_dim], float32.

    GLM's, for neighbours, reads the first half and repeats it.
    """
    if interleaved:
        cos, sin = (torch.cat([each[:, ::2], each[:, ::2]], dim=1) for each in (cos, sin))
    return cos.float()[None], sin.float()[None]


def test_packed_projections_give_the_bits_of_separate_ones() -> None:
    native = load_native()
    if native is None:
        pytest.skip("the native library is not in use")
    shape = Shape(heads=6, kv_heads=2, key_dim=64, value_dim=64)
    sequences = Sequences(shape, [40])
    rows = [(0, 0, 40)]
    step = NativeAttention(sequences.step(rows), sequences.cache)
    spec = PackedSpec(
        heads=6, shape=shape.layer_shape, rotary_interleaved=False, q_scale=None, k_scale=None, norm_eps=0.0,
        attention=shape.spec,
    )  # fmt: skip
    out = step.attend_packed(0, packed(sequences, rows), torch.ones(40, 64), torch.zeros(40, 64), spec)
    assert torch.equal(out, sequences.attend(step, rows).flatten(1))


def kv_shape(dtype: str, dim: int) -> KVShape:
    return KVShape(dtype, (LayerShape(1, 16, 16), LayerShape(1, 16, dim)))


def test_unsupported_shapes_are_computed_by_torch() -> None:
    best = BatchedAttention if load_native() is None else NativeAttention
    assert choose_backend("auto", CPU, kv_shape("bfloat16", 256)) is best
    assert choose_backend("auto", CPU, kv_shape("float16", 16)) is BatchedAttention
    assert choose_backend("native", CPU, kv_shape("float32", 257)) is BatchedAttention
    assert choose_backend("reference", CPU, kv_shape("float32", 16)) is ReferenceAttention


def test_gpus_use_triton_kernels_if_triton_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, shape = torch.device("cuda"), kv_shape("float32", 16)
    monkeypatch.setattr("shoal.execute.attention.selector.find_spec", lambda name: None)
    assert choose_backend("auto", gpu, shape) is BatchedAttention
    with pytest.raises(ConfigError, match="needs the package triton"):
        check_backend("triton", gpu)
    with pytest.raises(ConfigError, match="for GPUs"):
        check_backend("triton", CPU)
    monkeypatch.setattr("shoal.execute.attention.selector.find_spec", lambda name: name)
    check_backend("triton", gpu)
    best = type("TritonAttention", (BatchedAttention,), {})
    step = SimpleNamespace(TritonAttention=best)
    support = SimpleNamespace(
        can_attend=lambda shape: shape.layers[1].value_dim <= 256,
        smoke_test=lambda shape, device: "no C compiler" if shape.dtype == "float16" else None,
    )
    monkeypatch.setitem(sys.modules, "shoal.execute.gpu.step", step)
    monkeypatch.setitem(sys.modules, "shoal.execute.gpu.support", support)
    assert choose_backend("auto", gpu, shape) is best
    assert choose_backend("triton", gpu, kv_shape("float32", 257)) is BatchedAttention
    assert not caplog.messages
    assert choose_backend("auto", gpu, kv_shape("float16", 16)) is BatchedAttention
    assert "no C compiler" in caplog.text


def test_an_unavailable_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="auto, reference, batched, native, triton"):
        check_backend("flash", CPU)
    with pytest.raises(ConfigError, match="for CPUs"):
        check_backend("native", torch.device("cuda:0"))
    monkeypatch.setattr("shoal.execute.attention.selector.load_native", lambda: None)
    with pytest.raises(ConfigError, match="not built"):
        check_backend("native", CPU)
    check_backend("auto", CPU)
    assert choose_backend("auto", CPU, kv_shape("float32", 16)) is BatchedAttention
