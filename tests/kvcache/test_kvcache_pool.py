"""BlockPool: allocation, sharing, prefix cache, eviction, fragmentation; a worked example each."""

import pickle
from itertools import pairwise

import pytest
from kvcache_builders import (
    GEMMA3,
    SMOLLM2,
    block_extents,
    cached_hashes,
    make_hash,
    make_merged_layout,
    make_pool,
    make_shape,
    make_split_pool,
)

from shoal.kvcache import BlockPool, IntegrityError, plan_layout


def allocate(pool: BlockPool, service: str, count: int) -> list[int]:
    blocks = pool.allocate(service, count)
    assert blocks is not None
    assert len(set(blocks)) == count
    return blocks


def publish(pool: BlockPool, service: str, blocks: list[int], first_hash: int) -> list[bytes]:
    hashes = [make_hash(first_hash + place) for place in range(len(blocks))]
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(service, [block], [block_hash])
    return hashes


def test_demand_is_counted_in_merged_blocks() -> None:
    pool = make_pool({"a": 4, "b": 3}, 5)
    assert pool.capacity == 5
    assert [pool.merged_demand("a", blocks) for blocks in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert (pool.max_blocks("a"), pool.max_blocks("b")) == (20, 15)
    split = make_split_pool(11)
    assert split.capacity == 11
    assert (split.merged_demand("a", 3), split.merged_demand("b", 3)) == (6, 9)
    assert (split.max_blocks("a"), split.max_blocks("b")) == (5, 3)


def test_a_merged_block_serves_one_service_at_a_time() -> None:
    pool = make_pool({"a": 4, "b": 3}, 2)
    a = allocate(pool, "a", 5)
    assert not pool.can_allocate("b", 1)
    assert pool.allocate("b", 1) is None
    pool.free("a", a[4:])
    b = allocate(pool, "b", 3)
    extents = [
        extent
        for service, blocks in (("a", a[:4]), ("b", b))
        for block in blocks
        for extent in block_extents(pool, service, block)
    ]
    extents.sort()
    assert all(left[1] <= right[0] for left, right in pairwise(extents))
    assert pool.usage().free_merged == 0
    pool.check_integrity({"a": [a[:4]], "b": [b]})


def test_allocation_is_all_or_nothing_and_keeps_the_cache_when_it_fails() -> None:
    pool = make_pool({"a": 4}, 2)
    cached = allocate(pool, "a", 4)
    hashes = publish(pool, "a", cached, 0)
    live = allocate(pool, "a", 3)
    pool.free("a", cached)
    assert pool.allocate("a", 6) is None
    assert cached_hashes(pool, "a", hashes) == set(hashes)
    assert pool.live_blocks("a") == 3
    assert pool.allocate("a", 0) == []
    assert pool.can_allocate("a", 5)
    rest = allocate(pool, "a", 5)
    assert cached_hashes(pool, "a", hashes) == set()
    pool.check_integrity({"a": [live, rest]})


def test_free_slots_are_filled_before_fresh_merged_blocks_and_the_fullest_first() -> None:
    pool = make_pool({"a": 4, "b": 1}, 4)
    a = allocate(pool, "a", 12)
    groups = {
        merged: [block for block in a if block // 4 == merged] for merged in {block // 4 for block in a}
    }
    sparse, fuller, full = groups.values()
    pool.free("a", sparse[:3])
    pool.free("a", fuller[:1])
    assert allocate(pool, "a", 1) == fuller[:1]
    assert pool.usage().free_merged == 1
    pool.free("a", sparse[3:])
    assert pool.usage().free_merged == 2
    pool.check_integrity({"a": [fuller, full]})


def test_published_blocks_stay_cached_and_are_matched_in_order() -> None:
    pool = make_pool({"a": 4}, 2)
    table = allocate(pool, "a", 3)
    hashes = publish(pool, "a", table, 0)
    pool.free("a", table)
    assert pool.live_blocks("a") == 0
    assert pool.usage().services["a"].cached_blocks == 3
    assert pool.match_prefix("a", [hashes[0], hashes[1], make_hash(99), hashes[2]]) == table[:2]
    assert pool.live_blocks("a") == 2
    assert pool.match_prefix("a", [make_hash(99), *hashes]) == []
    pool.check_integrity({"a": [table[:2]]})


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = make_pool({"a": 1}, 4)
    table = allocate(pool, "a", 4)
    hashes = publish(pool, "a", table, 0)
    pool.free("a", table)
    allocate(pool, "a", 2)
    assert cached_hashes(pool, "a", hashes) == set(hashes[:2])


def test_a_hit_becomes_most_recently_used() -> None:
    pool = make_pool({"a": 1}, 3)
    table = allocate(pool, "a", 3)
    hashes = publish(pool, "a", table, 0)
    for block in table:
        pool.free("a", [block])
    pool.free("a", pool.match_prefix("a", hashes[:1]))
    allocate(pool, "a", 2)
    assert cached_hashes(pool, "a", hashes) == {hashes[0]}


def test_prefixes_are_shared_inside_a_service_only() -> None:
    pool = make_pool({"a": 4, "b": 4}, 4)
    hashes = publish(pool, "a", allocate(pool, "a", 1), 0)
    assert pool.match_prefix("b", hashes) == []
    assert len(pool.match_prefix("a", hashes)) == 1


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = make_pool({"a": 4}, 1, prefix_caching=False)
    table = allocate(pool, "a", 1)
    hashes = publish(pool, "a", table, 0)
    assert not pool.is_shared("a", table[0])
    pool.free("a", table)
    assert pool.match_prefix("a", hashes) == []
    assert pool.usage().free_merged == 1


def test_a_hash_stays_with_its_first_block() -> None:
    pool = make_pool({"a": 4}, 1)
    first, second = allocate(pool, "a", 2)
    pool.publish("a", [first], [make_hash(1)])
    pool.publish("a", [first], [make_hash(1)])
    pool.publish("a", [second], [make_hash(1)])
    pool.free("a", [second])
    assert pool.usage().services["a"].cached_blocks == 0
    assert pool.match_prefix("a", [make_hash(1)]) == [first]
    with pytest.raises(IntegrityError, match="another hash"):
        pool.publish("a", [first], [make_hash(2)])


def test_publishing_returns_how_many_leading_blocks_other_requests_can_find() -> None:
    pool = make_pool({"a": 4}, 3)
    first, second, third, fourth = allocate(pool, "a", 4)
    assert pool.publish("a", [first], [make_hash(1)]) == 1
    # The second block's hash belongs to the first block; so blocks behind the second cannot be found.
    assert pool.publish("a", [second, third], [make_hash(1), make_hash(2)]) == 0
    pool.share("a", [fourth])
    assert pool.publish("a", [third, fourth], [make_hash(2), make_hash(1)]) == 2
    assert pool.publish("a", [], []) == 0


def test_forks_and_published_blocks_need_copy_on_write() -> None:
    pool = make_pool({"a": 4}, 1)
    forked, published, own = table = allocate(pool, "a", 3)
    pool.share("a", [forked])
    pool.publish("a", [published], [make_hash(1)])
    assert [pool.is_shared("a", block) for block in table] == [True, True, False]
    pool.free("a", [forked])
    assert not pool.is_shared("a", forked)
    assert pool.live_blocks("a") == 3
    assert own in table


def test_a_merged_block_with_a_live_block_is_never_evicted() -> None:
    pool = make_pool({"a": 4, "b": 3}, 1)
    table = allocate(pool, "a", 4)
    hashes = publish(pool, "a", table, 0)
    pool.free("a", table[1:])
    assert not pool.can_allocate("b", 1)
    assert pool.allocate("b", 1) is None
    assert cached_hashes(pool, "a", hashes) == set(hashes)
    pool.free("a", table[:1])
    assert pool.can_allocate("b", 3)
    b = allocate(pool, "b", 3)
    assert cached_hashes(pool, "a", hashes) == set()
    pool.check_integrity({"b": [b]})


def test_other_services_evict_the_least_recently_used_merged_block() -> None:
    pool = make_pool({"a": 2, "b": 1}, 2)
    first, second = allocate(pool, "a", 2), allocate(pool, "a", 2)
    hashes = publish(pool, "a", first + second, 0)
    # Last uses: 1 and 4 in the first merged block, 2 and 3 in the second.
    for block in (first[0], second[0], second[1], first[1]):
        pool.free("a", [block])
    allocate(pool, "b", 1)
    assert cached_hashes(pool, "a", hashes) == set(hashes[:2])


def test_the_older_of_own_block_and_foreign_merged_block_is_evicted() -> None:
    for own_first in (True, False):
        pool = make_pool({"a": 2, "b": 2}, 2)
        a, b = allocate(pool, "a", 2), allocate(pool, "b", 2)
        a_hashes, b_hashes = publish(pool, "a", a, 0), publish(pool, "b", b, 10)
        for service, blocks in (("a", a), ("b", b)) if own_first else (("b", b), ("a", a)):
            pool.free(service, blocks)
        taken = allocate(pool, "a", 1)
        if own_first:
            assert cached_hashes(pool, "a", a_hashes) == {a_hashes[0]}
            assert cached_hashes(pool, "b", b_hashes) == set(b_hashes)
        else:
            assert cached_hashes(pool, "a", a_hashes) == set(a_hashes)
            assert cached_hashes(pool, "b", b_hashes) == set()
        pool.check_integrity({"a": [taken]})


@pytest.mark.parametrize("older", ["a", "b"])
def test_split_evicts_the_least_recently_used_block_of_any_service(older: str) -> None:
    pool = make_split_pool(5)
    a, b = allocate(pool, "a", 1), allocate(pool, "b", 1)
    hashes = {"a": publish(pool, "a", a, 0), "b": publish(pool, "b", b, 0)}
    for service in (older, "b" if older == "a" else "a"):
        pool.free(service, a if service == "a" else b)
    allocate(pool, "a", 1)
    assert {name for name in "ab" if cached_hashes(pool, name, hashes[name])} == {"a", "b"} - {older}


def test_state_does_not_grow_with_use() -> None:
    pool = make_pool({"a": 2, "b": 1}, 50)
    table = allocate(pool, "a", 40)
    hashes = publish(pool, "a", table, 0)
    pool.free("a", table)
    sizes = set()
    for _ in range(30):
        for _ in range(20):
            pool.free("a", pool.match_prefix("a", hashes))
        sizes.add(len(pickle.dumps(pool)) // 4096)
    assert len(sizes) < 5


def test_freed_memory_of_another_dtype_is_to_be_zeroed_once() -> None:
    layout = make_merged_layout({"a": 4, "b": 2}, 2, {"a": "float32", "b": "bfloat16"})
    pool = BlockPool(layout)
    a = allocate(pool, "a", 5)
    assert pool.take_dirty() == ()
    pool.free("a", a)
    b = allocate(pool, "b", 2)
    assert pool.take_dirty() == (b[0] // 2,)
    assert pool.take_dirty() == ()
    pool.free("b", b)
    allocate(pool, "b", 2)
    assert pool.take_dirty() == ()


def test_split_units_of_another_dtype_are_to_be_zeroed_once() -> None:
    shapes = {"a": make_shape(layers=2), "b": make_shape(layers=3, dtype="bfloat16")}
    layout = plan_layout(shapes, memory_bytes=6 * 512, block_size=2, kind="split")
    pool = BlockPool(layout)
    a = allocate(pool, "a", 2)
    units = set(pool.unit_ids("a", a).ravel().tolist())
    pool.free("a", a)
    b = allocate(pool, "b", 2)
    assert pool.unit_ids("b", b).shape == (2, 3)
    assert set(pool.take_dirty()) == units
    assert pool.take_dirty() == ()


def test_split_blocks_share_units_freely_between_services() -> None:
    pool = make_split_pool(7)
    a = allocate(pool, "a", 2)
    b = allocate(pool, "b", 1)
    units = [*pool.unit_ids("a", a).ravel(), *pool.unit_ids("b", b).ravel()]
    assert sorted(units) == list(range(7))
    pool.free("a", a[:1])
    assert not pool.can_allocate("b", 1)
    pool.free("a", a[1:])
    assert pool.can_allocate("b", 1)
    with pytest.raises(ValueError, match="split"):
        make_pool({"a": 1}, 1).unit_ids("a", [0])


def test_fragmentation_of_a_known_situation() -> None:
    pool = make_pool({"a": 4, "b": 3}, 3)  # merged blocks of 3072 bytes: strides 768 and 1024
    allocate(pool, "a", 5)
    allocate(pool, "b", 1)
    usage = pool.usage()
    assert usage.free_merged == 0
    assert {name: used.free_blocks for name, used in usage.services.items()} == {"a": 3, "b": 2}
    assert {name: used.merged_blocks for name, used in usage.services.items()} == {"a": 2, "b": 1}
    assert usage.live_bytes == 5 * 768 + 1024
    assert usage.external_bytes() == 3 * 768 + 2 * 1024
    assert usage.external() == usage.external_bytes() / (3 * 3072)
    # 9 of 10 token slots of a are filled, 1 of 2 of b.
    assert usage.internal_bytes({"a": 9, "b": 1}) == 384 + 512
    assert usage.internal({"a": 9, "b": 1}) == (384 + 512) / (3 * 3072)


def test_padding_counts_as_internal_fragmentation() -> None:
    shapes = {"chat": SMOLLM2, "complete": GEMMA3}
    pool = BlockPool(plan_layout(shapes, memory_bytes=1 << 25, block_size=16, kind="split"))
    allocate(pool, "chat", 2)
    assert pool.usage().internal_bytes({"chat": 32}) == 2 * 90 * 16384 * 3 // 4


@pytest.mark.parametrize("pool", [make_pool({"a": 2}, 2), make_split_pool(8)], ids=["merged", "split"])
def test_blocks_without_references_cannot_be_freed_shared_or_published(pool: BlockPool) -> None:
    (block,) = allocate(pool, "a", 1)
    pool.free("a", [block])
    with pytest.raises(IntegrityError, match=f"block {block} is freed"):
        pool.free("a", [block])
    with pytest.raises(IntegrityError, match=f"block {block} is shared"):
        pool.share("a", [block])
    with pytest.raises(IntegrityError, match=f"block {block} is published"):
        pool.publish("a", [block], [make_hash(1)])
    pool.check_integrity({})
