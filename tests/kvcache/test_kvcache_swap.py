"""Layouts and pools for KV swapped to the host."""

import pytest
from kvcache_builders import GEMMA3, SMOLLM2, make_merged_layout, make_split_pool

from shoal.core import ConfigError
from shoal.kvcache import BlockPool, KVCacheOptions, plan_layout


@pytest.mark.parametrize("kind", ["merged", "split"])
@pytest.mark.parametrize("memory_bytes", [20 << 20, 300 << 20])
def test_a_resized_layout_differs_only_in_size(kind: str, memory_bytes: int) -> None:
    shapes = {"a": SMOLLM2, "b": GEMMA3}
    layout = plan_layout(shapes, memory_bytes=100 << 20, block_size=16, kind=kind)
    other = layout.resized(memory_bytes)
    assert memory_bytes - layout.merged_bytes < other.total_bytes <= memory_bytes
    assert other.merged_bytes == layout.merged_bytes
    assert (other.kind, other.block_size) == (kind, 16)
    assert other.services == layout.services
    assert BlockPool(other).max_blocks("a") > 0


def test_a_host_pool_must_hold_a_block() -> None:
    layout = make_merged_layout({"a": 4, "b": 3}, 5)
    assert layout.resized(layout.merged_bytes).merged_blocks == 1
    with pytest.raises(ConfigError, match=f"takes {layout.merged_bytes} bytes"):
        layout.resized(layout.merged_bytes - 1)
    split = make_split_pool(12).layout
    assert split.resized(3 * split.merged_bytes).merged_blocks == 3
    with pytest.raises(ConfigError, match="service 'b'"):
        split.resized(3 * split.merged_bytes - 1)


def test_the_engine_chooses_the_swap_size_by_default() -> None:
    assert KVCacheOptions().swap_bytes is None


def test_units_before_the_step_are_found_although_blocks_were_allocated_again() -> None:
    pool = make_split_pool(12)
    blocks = pool.allocate("a", 4)
    assert blocks is not None
    pool.take_dirty()
    before = pool.unit_ids("a", blocks)
    assert (pool.unit_ids("a", blocks, before=True) != before).any()

    pool.free("a", blocks)
    other = pool.allocate("b", 1)
    again = pool.allocate("a", 4)
    assert other is not None
    assert again is not None
    pool.free("a", again[:2])
    assert pool.allocate("a", 2) is not None
    pool.take_dirty()
    assert (pool.unit_ids("a", blocks) != before).any()
    assert (pool.unit_ids("a", blocks, before=True) == before).all()

    now = pool.unit_ids("a", blocks)
    pool.take_dirty()
    assert (pool.unit_ids("a", blocks, before=True) == now).all()


def test_freed_blocks_keep_their_units() -> None:
    pool = make_split_pool(12)
    blocks = pool.allocate("a", 3)
    assert blocks is not None
    pool.take_dirty()
    units = pool.unit_ids("a", blocks)
    pool.take_dirty()
    pool.free("a", blocks)
    pool.take_dirty()
    assert (pool.unit_ids("a", blocks, before=True) == units).all()
