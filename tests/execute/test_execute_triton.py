"""Attention of decodes by Triton's kernels is what the formulas say: on a GPU, or in Triton's interpreter."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from attention_builders import Sequences, Shape
from execute_builders import (
    HandScheduler,
    make_model,
    make_prompt,
    needs_triton,
    reference_tokens,
    tiny_config,
)
from graph_builders import FakeCapturer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_builders import BEYOND_INT32, TOLERANCE, Decodes
from strict_interpreter import strict_interpreter

from at_hand import DEVICE, on_cpu, on_gpu
from hypothesis_profiles import examples
from shoal.execute.attention.torch_backends import ReferenceAttention
from shoal.kvcache import KVShape, LayerShape

if TYPE_CHECKING:
    from shoal.execute.attention.triton_backend import TritonAttention

pytestmark = needs_triton

DTYPES = ["float32", "float16"] if DEVICE == "cpu" else list(TOLERANCE)
"""The interpreter of Triton 3.7 multiplies the bits of bfloat16 as if they were integers."""
PARTS = [1, 2, 3, 5, 8]
"""Into how many parts contexts are cut; so few take less time in the interpreter than what is chosen."""


@pytest.fixture(scope="module", autouse=True)
def _strict() -> Iterator[None]:
    if DEVICE != "cpu":
        yield
        return
    with strict_interpreter():
        yield


@pytest.fixture(scope="module")
def triton_step() -> type["TritonAttention"]:
    from shoal.execute.attention.triton_backend import TritonAttention

    return TritonAttention


def in_parts(patch: pytest.MonkeyPatch, parts: int) -> None:
    patch.setattr("shoal.execute.attention.triton_kernels.num_context_parts", lambda rows, kv_heads: parts)


def decodes(layout: str) -> st.SearchStrategy[Decodes]:
    return st.builds(
        Decodes,
        lengths=st.lists(
            st.sampled_from([0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 129, 200]), min_size=1, max_size=4
        ),
        group=st.sampled_from([*range(1, 9), 20]),
        kv_heads=st.integers(1, 3),
        key_dim=st.sampled_from([8, 16, 33, 64, 72, 80, 96, 128, 256]),
        value_dim=st.sampled_from([8, 16, 33, 64, 72, 80, 96, 128, 256]),
        block_size=st.sampled_from([1, 2, 3, 5, 16, 64]),
        layout=st.just(layout),
        window=st.sampled_from([None, None, 1, 5, 64, 70, 300]),
        softcap=st.sampled_from([None, None, 2.0, 30.0]),
        scaling=st.sampled_from([None, 0.3]),
        dtype=st.sampled_from(DTYPES),
        gap=st.sampled_from([0, 1, 8]),
        turned=st.sampled_from([False, False, True]),
        seed=st.integers(0, 3),
    )


LAYOUTS = pytest.mark.parametrize("layout", ["merged", "split"])


@LAYOUTS
@settings(max_examples=examples(75), deadline=None)
@given(data=st.data(), parts=st.sampled_from(PARTS))
def test_decodes_over_any_strides_match_the_formulas(layout: str, data: st.DataObject, parts: int) -> None:
    case = data.draw(decodes(layout))
    with pytest.MonkeyPatch.context() as patch:
        in_parts(patch, parts)
        case.check()


@LAYOUTS
@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_only_the_last_tokens_of_decodes_are_stored(layout: str, data: st.DataObject) -> None:
    data.draw(decodes(layout)).check_store()


@LAYOUTS
def test_rows_of_one_token_or_none_and_extreme_scores(layout: str) -> None:
    case = Decodes(lengths=[1, 0, 1, 1], layout=layout, scaling=1000.0)
    with pytest.MonkeyPatch.context() as patch:
        in_parts(patch, 3)
        case.check()
    case.check_store()


@LAYOUTS
def test_offsets_of_keys_may_exceed_32_bits(layout: str) -> None:
    try:
        case = Decodes(lengths=[20, 5], layout=layout, dtype="float16", unused=BEYOND_INT32)
    except (OSError, torch.OutOfMemoryError) as error:
        pytest.skip(f"there is no room for so large a pool: {error}")
    with pytest.MonkeyPatch.context() as patch:
        in_parts(patch, 2)
        case.check()
    case.check_store()


@pytest.mark.parametrize(("rows", "kv_heads", "parts"), [(1, 8, 32), (3, 7, 24), (64, 8, 1), (500, 8, 1)])
def test_contexts_are_split_into_more_parts_for_fewer_rows(rows: int, kv_heads: int, parts: int) -> None:
    from shoal.execute.attention.triton_kernels import num_context_parts

    assert num_context_parts(rows, kv_heads) == parts


shapes = st.builds(
    lambda group, **shape: Shape(heads=group * shape["kv_heads"], **shape),
    group=st.sampled_from([1, 2, 3, 7]),
    kv_heads=st.sampled_from([1, 2, 3]),
    key_dim=st.sampled_from([8, 16, 64, 72]),
    value_dim=st.sampled_from([8, 32, 64, 80]),
    window=st.sampled_from([None, None, 1, 5, 70]),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    scaling=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from(DTYPES),
)


@settings(max_examples=examples(25), deadline=None)
@given(
    shape=shapes,
    lengths=st.lists(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 130, 300]), max_size=5),
    prompt=st.sampled_from([0, 4, 9]),
    layout=st.sampled_from(["merged", "split"]),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_decodes_of_any_lengths_match_the_reference(
    triton_step: type["TritonAttention"],
    shape: Shape,
    lengths: list[int],
    prompt: int,
    layout: str,
    block_size: int,
) -> None:
    """Rows decode behind what is in the pool, which else is full of NaN; the last tokens of a prompt, too."""
    assume(lengths or prompt)
    ends = sorted(lengths, reverse=True)
    firsts = [end - 1 for end in ends]
    if prompt:
        ends, firsts = [*ends, 9], [*firsts, 9 - prompt]
    sequences = Sequences(shape, ends, layout, block_size, layers=2)
    sequences.store(firsts, layer=1)
    rows = [(row, first, end) for row, (first, end) in enumerate(zip(firsts, ends, strict=True))]
    step = sequences.step(rows)
    expected = sequences.attend(ReferenceAttention(step, sequences.cache), rows, layer=1)
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            in_parts(patch, 3)
        out = sequences.attend(triton_step(step, sequences.cache), rows, layer=1)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=TOLERANCE[shape.dtype])


@on_cpu
@pytest.mark.parametrize(("kind", "layout"), [("gemma2", "merged"), ("llama", "split")])
def test_a_model_with_interpreted_decodes_generates_the_tokens_of_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    triton_step: type["TritonAttention"],
    kind: str,
    layout: str,
) -> None:
    """No user may choose these kernels on a CPU: they take seconds for what others do in milliseconds."""
    in_parts(monkeypatch, 2)
    folder = make_model(tmp_path / "m", tiny_config(kind))
    prompts = [make_prompt(length, seed=length) for length in (1, 5, 23)]
    scheduler = HandScheduler({"m": folder}, attention="batched", layout=layout)
    scheduler.models.backends["m"] = triton_step
    scheduler.executor._capturer = FakeCapturer()
    scheduler.poison()
    assert scheduler.generate("m", prompts, 4) == [reference_tokens(folder, p, 4) for p in prompts]
    recorded = {name: graphs.sizes for name, graphs in scheduler.executor._graphs.items()}
    assert recorded == ({"m": [4]} if layout == "merged" else {})


@on_gpu
@LAYOUTS
def test_decodes_are_captured_for_graph_sizes(tmp_path: Path, layout: str) -> None:
    """Seven rows share the recorded step of eight. In the split layout nothing is recorded."""
    folder = make_model(tmp_path / "m", tiny_config("llama"))
    prompts = [make_prompt(3 + 4 * number, seed=number) for number in range(7)]
    scheduler = HandScheduler({"m": folder}, layout=layout)
    expected = [reference_tokens(folder, prompt, 6) for prompt in prompts]
    assert scheduler.generate("m", prompts, 6) == expected
    scheduler.executor.store.lay_out(scheduler.layout, None)
    assert scheduler.generate("m", prompts[:1], 6) == expected[:1]
    graphs = {name: graphs.sizes for name, graphs in scheduler.executor._graphs.items()}
    assert graphs == ({"m": [1, 8]} if layout == "merged" else {})


def test_the_kernels_are_tried_before_they_are_chosen(
    triton_step: type["TritonAttention"], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.execute.attention import triton_backend as triton_attention

    shape = KVShape("float32", (LayerShape(2, 16, 24),))
    assert triton_attention.smoke_test(shape, torch.device(DEVICE)) is None

    def fail(*arguments: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(triton_attention, "attend_decodes", fail)
    assert triton_attention.smoke_test(shape, torch.device(DEVICE)) == "RuntimeError: no C compiler"
