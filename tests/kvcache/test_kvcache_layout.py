"""plan_layout: addressing, alignment, waste, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache_builders import GEMMA3, SMOLLM2, make_shape

from hypothesis_profiles import examples
from shoal.core import ConfigError
from shoal.kvcache import (
    MAX_PADDING,
    KVShape,
    LayerShape,
    PoolLayout,
    extend_layout,
    keeps_blocks,
    plan_layout,
    reduce_layout,
)

layer_shapes = st.builds(LayerShape, st.integers(1, 3), st.sampled_from([4, 8, 12]), st.sampled_from([4, 8]))
kv_shapes = st.builds(
    KVShape,
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.lists(layer_shapes, min_size=1, max_size=4).map(tuple),
)
shape_sets = st.lists(kv_shapes, min_size=1, max_size=4).map(
    lambda shapes: {f"service{number}": shape for number, shape in enumerate(shapes)}
)


def numbers_of(dtype: str) -> np.dtype:
    return np.dtype({"float32": np.uint32}.get(dtype, np.uint16))


def most_blocks(size: int, block: int) -> int:
    """Brute force: the most sub-blocks with an aligned stride that a merged block of ``size`` can hold."""
    return max((n for n in range(1, size // block + 1) if size % (n * 256) == 0), default=0)


def test_block_bytes_of_the_models_at_hand() -> None:
    assert SMOLLM2.token_bytes() == 30 * 2 * 3 * 64 * 2
    assert SMOLLM2.block_bytes(16) == 368_640
    assert GEMMA3.block_bytes(16) == 294_912


def test_both_models_at_hand_share_without_padding() -> None:
    layout = plan_layout({"chat": SMOLLM2, "complete": GEMMA3}, memory_bytes=2 << 30, block_size=16)
    assert layout.merged_bytes == 1_474_560
    assert layout.merged_blocks == (2 << 30) // 1_474_560
    assert layout.services["chat"].blocks_per_merged == 4
    assert layout.services["complete"].blocks_per_merged == 5
    assert layout.padding("chat") == layout.padding("complete") == 0


def test_one_service_needs_no_merging() -> None:
    layout = plan_layout({"chat": SMOLLM2}, memory_bytes=10 * 368_640 + 5, block_size=16)
    assert layout.merged_bytes == layout.services["chat"].stride_bytes == 368_640
    assert layout.merged_blocks == 10


def test_small_pools_take_padding_over_large_merged_blocks() -> None:
    layout = plan_layout({"chat": SMOLLM2, "complete": GEMMA3}, memory_bytes=8 << 20, block_size=16)
    assert layout.merged_bytes == 368_640
    assert layout.padding("complete") == pytest.approx(0.2)


def test_prime_sizes_do_not_multiply_into_huge_merged_blocks() -> None:
    shapes = {"a": make_shape(dim=1009 * 8), "b": make_shape(dim=1013 * 8)}
    layout = plan_layout(shapes, memory_bytes=1 << 34, block_size=16)
    assert layout.merged_bytes <= 2 * shapes["b"].block_bytes(16)
    assert max(layout.padding("a"), layout.padding("b")) < 0.01


def test_a_little_padding_is_not_worth_much_larger_merged_blocks() -> None:
    # Llama 2 7B and 13B: 8 MiB and 12.5 MiB per block; three and two leave 4% of padding to one of them.
    shapes = {
        "7b": make_shape(layers=32, kv_heads=32, dim=128, dtype="float16"),
        "13b": make_shape(layers=40, kv_heads=40, dim=128, dtype="float16"),
    }
    layout = plan_layout(shapes, memory_bytes=40 << 30, block_size=16)
    assert {name: view.blocks_per_merged for name, view in layout.services.items()} == {"7b": 3, "13b": 2}
    assert layout.padding("7b") == pytest.approx(0.04, abs=1e-3)
    assert layout.padding("13b") == pytest.approx(0, abs=1e-3)


def test_a_much_smaller_model_is_packed_even_in_a_tiny_pool() -> None:
    shapes = {"large": make_shape(layers=8, dim=1024), "small": make_shape(dim=8)}
    size = shapes["large"].block_bytes(16)
    layout = plan_layout(shapes, memory_bytes=size + size // 2, block_size=16)
    assert layout.merged_blocks == 1
    assert layout.services["small"].blocks_per_merged > size / shapes["small"].block_bytes(16) / 2


@settings(max_examples=examples(150), deadline=None)
@given(shape_sets, st.integers(1, 5), st.integers(1, 300_000))
def test_merged_strides_are_exact_aligned_and_large_enough(
    shapes: dict[str, KVShape], block_size: int, extra: int
) -> None:
    needed = max(-(-shape.block_bytes(block_size) // 256) * 256 for shape in shapes.values())
    layout = plan_layout(shapes, memory_bytes=needed + extra, block_size=block_size)
    assert layout.merged_blocks >= 1
    assert layout.total_bytes == layout.merged_blocks * layout.merged_bytes <= needed + extra
    assert layout.merged_bytes <= 32 * needed
    for name, view in layout.services.items():
        assert view.stride_bytes * view.blocks_per_merged == layout.merged_bytes
        assert view.stride_bytes % 256 == 0
        assert view.stride_bytes >= shapes[name].block_bytes(block_size)
        assert view.blocks_per_merged == most_blocks(
            layout.merged_bytes, shapes[name].block_bytes(block_size)
        )
        assert view.units_per_block == 1


@settings(max_examples=examples(60), deadline=None)
@given(shape_sets, st.integers(1, 3), st.integers(0, 200_000))
def test_no_smaller_merged_block_with_fewer_sub_blocks_pads_less(
    shapes: dict[str, KVShape], block_size: int, extra: int
) -> None:
    block_bytes = {name: shape.block_bytes(block_size) for name, shape in shapes.items()}
    needed = max(-(-size // 256) * 256 for size in block_bytes.values())
    layout = plan_layout(shapes, memory_bytes=needed + extra, block_size=block_size)
    chosen = {name: view.blocks_per_merged for name, view in layout.services.items()}
    padding = sum(layout.padding(name) for name in shapes)
    for size in range(needed, layout.merged_bytes, 256):
        counts = {name: most_blocks(size, block_bytes[name]) for name in shapes}
        if all(counts[name] <= chosen[name] for name in shapes):
            other = sum(1 - counts[name] * block_bytes[name] / size for name in shapes)
            assert other >= padding - 1e-9


@settings(max_examples=examples(60), deadline=None)
@given(shape_sets, st.integers(1, 4))
def test_merged_views_address_every_element_once(shapes: dict[str, KVShape], block_size: int) -> None:
    layout = plan_layout(shapes, memory_bytes=64 << 10, block_size=block_size)
    for view in layout.services.values():
        dtype = numbers_of(view.shape.dtype)
        buffer = np.zeros(layout.total_bytes // dtype.itemsize, dtype=dtype)
        stride = view.stride_bytes // dtype.itemsize
        blocks = min(layout.merged_blocks * view.blocks_per_merged, 3)
        written = 0
        for block in range(blocks):
            for extent in view.layers:
                for offset, dim in (
                    (extent.key_offset, extent.key_dim),
                    (extent.value_offset, extent.value_dim),
                ):
                    size = block_size * extent.kv_heads * dim
                    start = block * stride + offset // dtype.itemsize
                    assert offset % dtype.itemsize == 0
                    part = buffer[start : start + size].reshape(block_size, extent.kv_heads, dim)
                    assert not part.any()
                    part += 1
                    written += size
        assert int(buffer.astype(np.int64).sum()) == written
        assert written * dtype.itemsize == blocks * view.shape.block_bytes(block_size)


def test_keys_and_values_of_a_layer_are_adjacent_and_layers_in_order() -> None:
    shape = KVShape("float16", (LayerShape(2, 8, 4), LayerShape(1, 16, 16)))
    view = plan_layout({"a": shape}, memory_bytes=1 << 16, block_size=4).services["a"]
    assert [(extent.key_offset, extent.value_offset) for extent in view.layers] == [(0, 128), (192, 320)]


def split_layout(shapes: dict[str, KVShape], memory_bytes: int) -> PoolLayout:
    return plan_layout(shapes, memory_bytes=memory_bytes, block_size=16, kind="split")


def test_split_units_are_the_largest_head_and_the_waste_is_reported() -> None:
    layout = split_layout({"chat": SMOLLM2, "complete": GEMMA3}, 1 << 28)
    assert layout.merged_bytes == 16 * (256 + 256) * 2
    assert layout.merged_blocks == (1 << 28) // 16384
    chat, complete = layout.services["chat"], layout.services["complete"]
    assert (chat.units_per_block, complete.units_per_block) == (90, 18)
    assert (layout.padding("chat"), layout.padding("complete")) == (0.75, 0)
    assert [extent.first_unit for extent in chat.layers] == [3 * number for number in range(30)]
    assert {(extent.key_offset, extent.value_offset) for extent in chat.layers} == {(0, 16 * 64 * 2)}


@pytest.mark.parametrize("kind", ["merged", "split"])
def test_too_little_memory_says_how_much_is_needed(kind: str) -> None:
    shapes = {"chat": SMOLLM2}
    needed = 368_640
    assert plan_layout(shapes, memory_bytes=needed, block_size=16, kind=kind).total_bytes == needed
    with pytest.raises(ConfigError, match=r"'chat'.* 368640 bytes"):
        plan_layout(shapes, memory_bytes=needed - 1, block_size=16, kind=kind)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="merged, split"):
        plan_layout({"chat": SMOLLM2}, memory_bytes=1 << 30, block_size=16, kind="paged")
    with pytest.raises(ConfigError, match="block_size"):
        plan_layout({"chat": SMOLLM2}, memory_bytes=1 << 30, block_size=0)
    with pytest.raises(ConfigError, match="at least one service"):
        plan_layout({}, memory_bytes=1 << 30, block_size=16)
    with pytest.raises(ConfigError, match="float8"):
        KVShape("float8", (LayerShape(1, 1, 1),))
    with pytest.raises(ConfigError, match="at least one layer"):
        KVShape("float32", ())
    with pytest.raises(ConfigError, match="kv_heads"):
        LayerShape(0, 1, 1)


@given(shape_sets, kv_shapes, st.integers(1, 4), st.integers(10_000, 200_000))
def test_an_extension_is_the_largest_that_fits_and_moves_no_block(
    shapes: dict[str, KVShape], coming: KVShape, block_size: int, memory_bytes: int
) -> None:
    try:
        layout = plan_layout(shapes, memory_bytes=memory_bytes, block_size=block_size)
    except ConfigError:
        return
    block = coming.block_bytes(block_size)
    most = most_blocks(layout.merged_bytes, block)
    extended = extend_layout(layout, "new", coming)
    if not most or most * block < (1 - MAX_PADDING) * layout.merged_bytes:
        assert extended is None
        return
    assert extended is not None
    assert extended.services["new"].blocks_per_merged == most
    assert extended.services["new"].stride_bytes * most == layout.merged_bytes
    assert extended.padding("new") <= MAX_PADDING + 1e-9
    assert {name: extended.services[name] for name in shapes} == layout.services
    assert extended.total_bytes == layout.total_bytes
    assert keeps_blocks(layout, extended)
    assert reduce_layout(extended, "new") == layout


@given(shape_sets)
def test_a_planned_service_can_be_taken_out_and_put_back_in_its_place(shapes: dict[str, KVShape]) -> None:
    layout = plan_layout(shapes, memory_bytes=200_000, block_size=2)
    for name, shape in shapes.items():
        again = extend_layout(reduce_layout(layout, name), name, shape)
        if layout.padding(name) < MAX_PADDING:
            assert again is not None
            assert again.services == layout.services
        else:
            assert again is None or again.services == layout.services
