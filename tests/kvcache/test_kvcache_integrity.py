"""check_integrity finds corrupted state."""

from collections.abc import Callable
from typing import Any

import pytest
from kvcache_builders import make_hash, make_pool, make_split_pool

from shoal.kvcache import BlockPool, IntegrityError

Corrupt = Callable[[Any], object]


def busy_pool(pool: BlockPool) -> tuple[BlockPool, dict[str, list[list[int]]]]:
    """Service "a": three live blocks, one of them twice, one published, and two cached; "b": one live."""
    table = pool.allocate("a", 6)
    other = pool.allocate("b", 1)
    assert table is not None
    assert other is not None
    for place in (0, 4, 5):
        pool.publish("a", [table[place]], [make_hash(place)])
    pool.share("a", table[:1])
    pool.free("a", table[3:])
    tables = {"a": [table[:3], table[:1]], "b": [other]}
    pool.check_integrity(tables)
    return pool, tables


def state(pool: Any, service: str = "a") -> Any:
    return pool._services[service]


def owned(pool: Any, service: int = 0) -> Any:
    return pool._allocator._owned[service]


def lose_merged(pool: Any) -> None:
    pool._allocator._free_merged.pop()


def double_merged(pool: Any) -> None:
    pool._allocator._free_merged.append(pool._allocator._free_merged[0])


def free_a_merged_in_use(pool: Any) -> None:
    pool._allocator._free_merged[-1] = next(iter(owned(pool).free_slots))


def lose_free_slot(pool: Any) -> None:
    next(iter(owned(pool).free_slots.values())).pop()


def free_slot_is_live(pool: Any) -> None:
    next(iter(owned(pool).free_slots.values()))[0] = state(pool).ref_counts.index(1)


def misplace_free_slots(pool: Any) -> None:
    by_num_free = owned(pool).by_num_free
    by_num_free[9] = by_num_free.pop(next(iter(by_num_free)))


def drop_reference(pool: Any) -> None:
    ref_counts = state(pool).ref_counts
    ref_counts[ref_counts.index(1)] = 0


def negative_reference(pool: Any) -> None:
    state(pool).ref_counts[-1] = -1


def miscount_live(pool: Any) -> None:
    state(pool).num_live += 1


def lose_hash(pool: Any) -> None:
    state(pool).index.block_of.popitem()


def swap_hash(pool: Any) -> None:
    index = state(pool).index
    first, second = list(index.block_of)[:2]
    index.block_of[first], index.block_of[second] = index.block_of[second], index.block_of[first]


def lose_cached(pool: Any) -> None:
    state(pool).index.cached.popitem()


def disorder_cached(pool: Any) -> None:
    cached = state(pool).index.cached
    cached.move_to_end(next(iter(cached)))


def miscount_cached(pool: Any) -> None:
    num_cached = owned(pool).num_cached
    num_cached[next(iter(num_cached))] += 1


def make_evictable(pool: Any) -> None:
    owned(pool).evictable[0] = 1


def hide_evictable(pool: Any) -> None:
    owned(pool).lru_heap.clear()


def miscount_merged(pool: Any) -> None:
    owned(pool).num_merged += 1


def miscount_free_slots(pool: Any) -> None:
    owned(pool).num_free_slots += 1


EVERY_LAYOUT: list[Corrupt] = [
    drop_reference,
    negative_reference,
    miscount_live,
    lose_hash,
    swap_hash,
    lose_cached,
    disorder_cached,
]
MERGED: list[Corrupt] = [
    lose_merged,
    double_merged,
    free_a_merged_in_use,
    lose_free_slot,
    free_slot_is_live,
    misplace_free_slots,
    miscount_cached,
    make_evictable,
    hide_evictable,
    miscount_merged,
    miscount_free_slots,
]


@pytest.mark.parametrize("corrupt", EVERY_LAYOUT + MERGED, ids=lambda corrupt: corrupt.__name__)
def test_corrupted_merged_state_is_found(corrupt: Corrupt) -> None:
    pool, _ = busy_pool(make_pool({"a": 4, "b": 2}, 6))
    # The last merged block of "a" holds nothing but cached and free blocks, so it may be evicted.
    assert owned(pool).evictable
    corrupt(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


def lose_unit(pool: Any) -> None:
    pool._allocator._free_count -= 1


def share_unit(pool: Any) -> None:
    table = pool._allocator._tables[0]
    live = state(pool).ref_counts.index(1)
    table[live, 0] = table[live, 1]


def steal_unit(pool: Any) -> None:
    pool._allocator._tables[0][state(pool).ref_counts.index(1), 0] = pool._allocator._free_units[0]


def lose_row(pool: Any) -> None:
    pool._allocator._free_rows[0].pop()


@pytest.mark.parametrize(
    "corrupt",
    [*EVERY_LAYOUT, lose_unit, share_unit, steal_unit, lose_row],
    ids=lambda corrupt: corrupt.__name__,
)
def test_corrupted_split_state_is_found(corrupt: Corrupt) -> None:
    pool, _ = busy_pool(make_split_pool(30))
    corrupt(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


@pytest.mark.parametrize("kind", ["merged", "split"])
def test_reference_counts_are_compared_with_the_tables(kind: str) -> None:
    pool, tables = busy_pool(make_pool({"a": 4, "b": 2}, 6) if kind == "merged" else make_split_pool(30))
    pool.share("a", tables["a"][1])
    pool.check_integrity()
    with pytest.raises(IntegrityError, match="the tables say"):
        pool.check_integrity(tables)
    with pytest.raises(IntegrityError, match="b: references"):
        pool.check_integrity({"a": [*tables["a"], tables["a"][1]]})


def test_services_that_claim_one_merged_block_are_found() -> None:
    pool = make_pool({"a": 1, "b": 1}, 2)
    pool.allocate("a", 1)
    pool.allocate("b", 1)
    theirs: Any = pool
    ref_counts = state(theirs, "b").ref_counts
    ref_counts.reverse()
    with pytest.raises(IntegrityError, match="belongs to"):
        pool.check_integrity()
