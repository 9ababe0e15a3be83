"""Attention of decodes on a GPU is that of the reference."""

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
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from at_hand import DEVICE
from hypothesis_profiles import examples
from shoal.execute.paged import ReferenceStep
from shoal.kvcache import KVShape, LayerShape

if TYPE_CHECKING:
    from shoal.execute.triton_attention import TritonStep

pytestmark = needs_triton

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}

shapes = st.builds(
    lambda group, **shape: Shape(heads=group * shape["kv_heads"], **shape),
    group=st.sampled_from([1, 2, 3, 7]),
    kv_heads=st.sampled_from([1, 2, 3]),
    key_dim=st.sampled_from([8, 16, 64, 72]),
    value_dim=st.sampled_from([8, 32, 64, 80]),
    window=st.sampled_from([None, None, 1, 5, 70]),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    scaling=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from(["float32", "float16"] if DEVICE == "cpu" else list(TOLERANCE)),
)


@pytest.fixture(scope="module")
def triton_step() -> type["TritonStep"]:
    from shoal.execute.triton_attention import TritonStep

    return TritonStep


@settings(max_examples=examples(25), deadline=None)
@given(
    shape=shapes,
    lengths=st.lists(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 130, 300]), max_size=5),
    prompt=st.sampled_from([0, 4, 9]),
    layout=st.sampled_from(["merged", "split"]),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_decodes_of_any_lengths_attend_what_the_reference_does(
    triton_step: type["TritonStep"],
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
    expected = sequences.attend(ReferenceStep(step, sequences.cache), rows, layer=1)
    out = sequences.attend(triton_step(step, sequences.cache), rows, layer=1)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=TOLERANCE[shape.dtype])


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a CUDA device (SHOAL_TEST_DEVICE)")
@pytest.mark.parametrize("layout", ["merged", "split"])
def test_decodes_are_recorded_for_some_numbers_of_rows(tmp_path: Path, layout: str) -> None:
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
    triton_step: type["TritonStep"], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.execute import triton_attention

    shape = KVShape("float32", (LayerShape(2, 16, 24),))
    assert triton_attention.why_not(shape, torch.device(DEVICE)) is None

    def fail(*arguments: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(triton_attention, "attend_decodes", fail)
    assert triton_attention.why_not(shape, torch.device(DEVICE)) == "RuntimeError: no C compiler"
