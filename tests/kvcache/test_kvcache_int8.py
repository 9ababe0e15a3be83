"""int8 KV: how many bytes it takes, and where in a block it lies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache_builders import GEMMA3, SMOLLM2

from hypothesis_profiles import examples
from shoal.kvcache import BlockPool, KVShape, LayerShape, plan_layout

SMOLLM2_INT8 = KVShape("bfloat16", SMOLLM2.layers, int8=True)
GEMMA3_INT8 = KVShape("bfloat16", GEMMA3.layers, int8=True)

shapes = st.builds(
    KVShape,
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.lists(
        st.builds(LayerShape, st.integers(1, 3), st.sampled_from([1, 7, 65]), st.sampled_from([3, 8, 130])),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.just(True),
)


def test_a_token_takes_a_byte_for_each_number_and_two_for_each_scale() -> None:
    assert SMOLLM2_INT8.token_bytes() == 30 * 3 * 2 * (64 + 2)
    assert GEMMA3_INT8.token_bytes() == 18 * 1 * 2 * (256 + 4 * 2)
    assert KVShape("float32", (LayerShape(2, 16, 80),), int8=True).token_bytes() == 2 * (16 + 2 + 80 + 4)


def tokens_in_a_gib(shape: KVShape, kind: str) -> int:
    layout = plan_layout({"a": shape}, memory_bytes=1 << 30, block_size=16, kind=kind)
    return BlockPool(layout).max_blocks("a") * 16


@pytest.mark.parametrize(
    ("shape", "int8", "gain"), [(SMOLLM2, SMOLLM2_INT8, 128 / 66), (GEMMA3, GEMMA3_INT8, 512 / 264)]
)
def test_a_pool_holds_about_twice_the_tokens_of_bfloat16(shape: KVShape, int8: KVShape, gain: float) -> None:
    assert tokens_in_a_gib(int8, "merged") * int8.token_bytes() == pytest.approx(1 << 30, rel=0.005)
    assert tokens_in_a_gib(int8, "merged") / tokens_in_a_gib(shape, "merged") == pytest.approx(
        gain, rel=0.005
    )


def test_split_units_are_filled_up_to_256_bytes() -> None:
    assert 16 * 2 * 66 == 2112
    assert tokens_in_a_gib(SMOLLM2_INT8, "split") == (1 << 30) // (2304 * 90) * 16


@settings(max_examples=examples(60), deadline=None)
@given(shapes, st.integers(1, 5), st.sampled_from(["merged", "split"]))
def test_the_parts_of_a_block_fill_it_without_overlap(shape: KVShape, block_size: int, kind: str) -> None:
    layout = plan_layout({"a": shape}, memory_bytes=64 << 10, block_size=block_size, kind=kind)
    view = layout.services["a"]
    written = np.zeros(view.held_block_bytes, dtype=np.int64)
    for extent in view.layers:
        heads = extent.kv_heads if kind == "merged" else 1
        for head in range(extent.kv_heads if kind == "split" else 1):
            unit = (extent.first_unit + head) * view.stride_bytes if kind == "split" else 0
            for offset, row in (
                (extent.key_offset, extent.key_dim),
                (extent.value_offset, extent.value_dim),
                (extent.key_scale_offset, 2 * -(-extent.key_dim // 64)),
                (extent.value_scale_offset, 2 * -(-extent.value_dim // 64)),
            ):
                written[unit + offset : unit + offset + block_size * heads * row] += 1
    assert written.max() == 1
    assert written.sum() == shape.block_bytes(block_size)
