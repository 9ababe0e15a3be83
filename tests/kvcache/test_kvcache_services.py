"""Adding and removing services of a pool: refusals and zeroing; random sequences are in ..._random.py."""

import pytest
from kvcache_builders import make_hash, make_merged_layout, make_pool, make_shape, make_split_pool

from shoal.kvcache import BlockPool, IntegrityError, extend_layout, reduce_layout


def test_memory_taken_by_a_new_service_of_another_dtype_is_zeroed() -> None:
    pool = make_pool({"a": 2}, 3)
    blocks = pool.allocate("a", 4)
    assert blocks is not None
    pool.free("a", blocks)
    half = make_shape(dim=64, dtype="bfloat16")
    extended = extend_layout(pool.layout, "b", half)
    assert extended is not None
    pool.lay_out(extended)
    taken = pool.allocate("b", 2)
    assert taken is not None
    per_merged = extended.services["b"].blocks_per_merged
    assert pool.take_dirty() == tuple(dict.fromkeys(block // per_merged for block in taken))
    pool.free("b", taken)
    pool.lay_out(reduce_layout(pool.layout, "b"))
    again = pool.allocate("a", 6)
    assert again is not None
    assert {block // 2 for block in taken} & set(pool.take_dirty()), "b's bits are cleared after b has gone"


def test_a_service_added_again_finds_no_earlier_prefix() -> None:
    pool = make_pool({"a": 2, "b": 1}, 3)
    both = pool.layout
    blocks = pool.allocate("a", 2)
    assert blocks is not None
    pool.publish("a", blocks, [make_hash(1), make_hash(2)])
    pool.free("a", blocks)
    pool.lay_out(reduce_layout(both, "a"))
    assert pool.usage().free_merged == 3
    with pytest.raises(KeyError):
        pool.allocate("a", 1)
    pool.lay_out(both)
    assert pool.match_prefix("a", [make_hash(1)]) == []
    pool.check_integrity({})


def test_layouts_that_would_drop_live_blocks_are_refused() -> None:
    pool = make_pool({"a": 2, "b": 1}, 3)
    assert pool.allocate("a", 1) == [0]
    for layout in (reduce_layout(pool.layout, "a"), make_merged_layout({"a": 3, "b": 1}, 2)):
        with pytest.raises(IntegrityError, match="a has live blocks"):
            pool.lay_out(layout)
    pool.check_integrity({"a": [[0]]})


def test_a_pool_may_have_no_services() -> None:
    pool = make_pool({"a": 2}, 3)
    layout = pool.layout
    pool.lay_out(reduce_layout(layout, "a"))
    assert (pool.usage().free_merged, pool.usage().services) == (3, {})
    pool.check_integrity({})
    pool.lay_out(layout)
    assert pool.can_allocate("a", 6)


def test_the_split_layout_is_laid_out_once() -> None:
    pool = make_split_pool(8)
    with pytest.raises(ValueError, match="merged layout"):
        pool.lay_out(reduce_layout(pool.layout, "a"))
    merged = BlockPool(make_merged_layout({"a": 1}, 1))
    with pytest.raises(ValueError, match="merged layout"):
        merged.lay_out(pool.layout)
