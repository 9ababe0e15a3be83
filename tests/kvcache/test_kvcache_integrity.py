"""check_integrity finds books that somebody has spoilt."""

from collections.abc import Callable
from typing import Any

import pytest
from kvcache_builders import block_hash, make_pool, make_split_pool

from shoal.kvcache import BlockPool, IntegrityError

Spoil = Callable[[Any], object]


def busy_pool(pool: BlockPool) -> tuple[BlockPool, dict[str, list[list[int]]]]:
    """Service "a": three live blocks, one of them twice, one published, and two cached; "b": one live."""
    table = pool.allocate("a", 6)
    other = pool.allocate("b", 1)
    assert table is not None
    assert other is not None
    for place in (0, 4, 5):
        pool.publish("a", [table[place]], [block_hash(place)])
    pool.share("a", table[:1])
    pool.free("a", table[3:])
    tables = {"a": [table[:3], table[:1]], "b": [other]}
    pool.check_integrity(tables)
    return pool, tables


def books(pool: Any, service: str = "a") -> Any:
    return pool._books[service]


def held(pool: Any, service: int = 0) -> Any:
    return pool._store._held[service]


def lose_merged(pool: Any) -> None:
    pool._store._free.pop()


def double_merged(pool: Any) -> None:
    pool._store._free.append(pool._store._free[0])


def free_a_held_merged(pool: Any) -> None:
    pool._store._free[-1] = next(iter(held(pool).holes))


def lose_hole(pool: Any) -> None:
    next(iter(held(pool).holes.values())).pop()


def hole_is_live(pool: Any) -> None:
    next(iter(held(pool).holes.values()))[0] = books(pool).references.index(1)


def misfile_hole(pool: Any) -> None:
    files = held(pool).by_holes
    files[9] = files.pop(next(iter(files)))


def drop_reference(pool: Any) -> None:
    references = books(pool).references
    references[references.index(1)] = 0


def negative_reference(pool: Any) -> None:
    books(pool).references[-1] = -1


def miscount_live(pool: Any) -> None:
    books(pool).live += 1


def lose_hash(pool: Any) -> None:
    books(pool).index.block_of.popitem()


def swap_hash(pool: Any) -> None:
    index = books(pool).index
    first, second = list(index.block_of)[:2]
    index.block_of[first], index.block_of[second] = index.block_of[second], index.block_of[first]


def forget_cached(pool: Any) -> None:
    books(pool).index.cached.popitem()


def disorder_cached(pool: Any) -> None:
    cached = books(pool).index.cached
    cached.move_to_end(next(iter(cached)))


def miscount_parked(pool: Any) -> None:
    parked = held(pool).parked
    parked[next(iter(parked))] += 1


def make_evictable(pool: Any) -> None:
    held(pool).idle[0] = 1


def hide_evictable(pool: Any) -> None:
    held(pool).coldest.clear()


def miscount_held(pool: Any) -> None:
    held(pool).merged += 1


def miscount_holes(pool: Any) -> None:
    held(pool).free_slots += 1


EVERY_LAYOUT: list[Spoil] = [
    drop_reference,
    negative_reference,
    miscount_live,
    lose_hash,
    swap_hash,
    forget_cached,
    disorder_cached,
]
MERGED: list[Spoil] = [
    lose_merged,
    double_merged,
    free_a_held_merged,
    lose_hole,
    hole_is_live,
    misfile_hole,
    miscount_parked,
    make_evictable,
    hide_evictable,
    miscount_held,
    miscount_holes,
]


@pytest.mark.parametrize("spoil", EVERY_LAYOUT + MERGED, ids=lambda spoil: spoil.__name__)
def test_spoilt_merged_books_are_found(spoil: Spoil) -> None:
    pool, _ = busy_pool(make_pool({"a": 4, "b": 2}, 6))
    # The last merged block of "a" holds nothing but cached blocks and holes, so it may be evicted.
    assert held(pool).idle
    spoil(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


def lose_unit(pool: Any) -> None:
    pool._store._free_count -= 1


def share_unit(pool: Any) -> None:
    table = pool._store._tables[0]
    live = books(pool).references.index(1)
    table[live, 0] = table[live, 1]


def steal_unit(pool: Any) -> None:
    pool._store._tables[0][books(pool).references.index(1), 0] = pool._store._free_units[0]


def lose_row(pool: Any) -> None:
    pool._store._free_rows[0].pop()


@pytest.mark.parametrize(
    "spoil",
    [*EVERY_LAYOUT, lose_unit, share_unit, steal_unit, lose_row],
    ids=lambda spoil: spoil.__name__,
)
def test_spoilt_split_books_are_found(spoil: Spoil) -> None:
    pool, _ = busy_pool(make_split_pool(30))
    spoil(pool)
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
    references = books(theirs, "b").references
    references.reverse()
    with pytest.raises(IntegrityError, match="belongs to"):
        pool.check_integrity()
