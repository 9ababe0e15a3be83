"""Compaction: everything that fits when packed is made to fit; nothing is lost, few blocks are copied."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcache_builders import (
    StampedBuffer,
    cached_hashes,
    make_hash,
    make_merged_layout,
    make_pool,
    make_split_pool,
)

from hypothesis_profiles import examples
from shoal.kvcache import BlockMove, BlockPool

PER_MERGED = [{"a": 4, "b": 3}, {"a": 2, "b": 8, "c": 1}, {"a": 6, "b": 4, "c": 9}]


@dataclass
class PoolUser:
    """Block tables over a pool, with a content and an optional hash for every block."""

    pool: BlockPool
    tables: list[tuple[str, list[int]]] = field(default_factory=list)
    hashes: dict[tuple[str, int], bytes] = field(default_factory=dict)
    numbers: int = 0

    def __post_init__(self) -> None:
        self.buffer = StampedBuffer(self.pool)
        self.contents: dict[tuple[str, int], int] = {}

    def take(self, service: str, count: int) -> list[int] | None:
        blocks = self.pool.allocate(service, count)
        if blocks is not None:
            self.tables.append((service, blocks))
            for block in blocks:
                self.write(service, block)
        return blocks

    def write(self, service: str, block: int) -> None:
        self.numbers += 1
        self.contents[service, block] = self.numbers
        self.hashes.pop((service, block), None)
        self.buffer.write(service, block, self.numbers)

    def publish(self, service: str, block: int) -> None:
        if (service, block) not in self.hashes:
            self.hashes[service, block] = make_hash(self.contents[service, block])
            self.pool.publish(service, [block], [self.hashes[service, block]])

    def live(self) -> Counter[tuple[str, int]]:
        return Counter((service, block) for service, table in self.tables for block in table)

    def demand(self, extra: Mapping[str, int]) -> int:
        """Merged blocks that all live blocks and ``extra`` occupy when packed."""
        counts = Counter(service for service, _ in self.live()) + Counter(extra)
        return sum(self.pool.merged_demand(service, count) for service, count in counts.items())

    def carry_out(self, moves: Sequence[BlockMove]) -> None:
        renamed = {(move.service, move.source): move.target for move in moves}
        assert len(renamed) == len(moves)
        for move in moves:
            content = self.contents[move.service, move.source]
            assert self.buffer.holds(move.service, move.source, content)
            self.buffer.write(move.service, move.target, content)
            self.contents[move.service, move.target] = content
            known = self.hashes.pop((move.service, move.source), None)
            self.hashes.pop((move.service, move.target), None)
            if known is not None:
                self.hashes[move.service, move.target] = known
        self.tables = [
            (service, [renamed.get((service, block), block) for block in table])
            for service, table in self.tables
        ]

    def check(self) -> None:
        tables: dict[str, list[list[int]]] = {}
        for service, table in self.tables:
            tables.setdefault(service, []).append(table)
        self.pool.check_integrity(tables)
        for service, block in self.live():
            assert self.buffer.holds(service, block, self.contents[service, block])
            known = self.hashes.get((service, block))
            if known is not None:
                assert self.pool.match_prefix(service, [known]) == [block]
                self.pool.free(service, [block])


Act = tuple[str, int, int]
acts = st.lists(
    st.tuples(
        st.sampled_from(
            ["take", "take", "take", "end", "thin", "thin", "fork", "publish", "publish", "zeroed"]
        ),
        st.integers(0, 30),
        st.integers(1, 12),
    ),
    min_size=10,
    max_size=60,
)


def act(user: PoolUser, what: str, which: int, size: int) -> None:
    names = list(user.pool.layout.services)
    if what == "take":
        user.take(names[which % len(names)], size)
    elif what == "zeroed":
        user.pool.take_dirty()
    elif user.tables:
        service, table = user.tables[which % len(user.tables)]
        if what == "end":
            user.tables.pop(which % len(user.tables))
            user.pool.free(service, table)
        elif what == "fork":
            user.pool.share(service, table)
            user.tables.append((service, list(table)))
        elif what == "thin":
            gone = table[size % 2 :: 2]
            del table[size % 2 :: 2]
            user.pool.free(service, gone)
        else:
            for block in table[: size // 2]:
                user.publish(service, block)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    per_merged=st.sampled_from(PER_MERGED),
    merged_blocks=st.integers(2, 9),
    mixed=st.booleans(),
    history=acts,
    requester=st.integers(0, 2),
)
def test_blocks_that_fit_when_packed_fit_after_a_compaction(
    per_merged: Mapping[str, int], merged_blocks: int, mixed: bool, history: list[Act], requester: int
) -> None:
    dtypes = {"b": "bfloat16"} if mixed else None
    user = PoolUser(BlockPool(make_merged_layout(per_merged, merged_blocks, dtypes)))
    for action in history:
        act(user, *action)
    user.check()
    pool = user.pool
    pool.take_dirty()
    service = list(per_merged)[requester % len(per_merged)]
    most = max(n for n in range(pool.max_blocks(service) + 1) if pool.can_allocate(service, n))
    assert pool.compact(service, most) is None
    assert not pool.can_compact(service, most)
    for count in range(most + 1, pool.max_blocks(service) + 2):
        trial = deepcopy(user)
        before = trial.pool.usage(), trial.live()
        moves = trial.pool.compact(service, count)
        assert (moves is not None) == pool.can_compact(service, count)
        assert (moves is not None) == (trial.demand({service: count}) <= merged_blocks)
        if moves is None:
            assert (trial.pool.usage(), trial.live()) == before
            continue
        assert all(move.service != service for move in moves)
        trial.carry_out(moves)
        assert sorted(trial.live().values()) == sorted(before[1].values())
        trial.check()
        assert trial.take(service, count) is not None
        trial.check()


def fewest_copied(pool: BlockPool, live: Mapping[int, int], per_merged: int, wanted: int) -> int:
    """The fewest blocks that must move to empty ``wanted`` of the merged blocks with these live counts."""
    return min(
        sum(live[m] for m in emptied)
        for emptied in combinations(live, wanted)
        if sum(live.values()) <= (len(live) - wanted) * per_merged
    )


@settings(max_examples=examples(100), deadline=None)
@given(kept=st.lists(st.integers(1, 6), min_size=2, max_size=6), count=st.integers(1, 4))
def test_as_few_blocks_as_possible_are_copied(kept: list[int], count: int) -> None:
    pool = make_pool({"a": 6, "b": 1}, len(kept))
    blocks = pool.allocate("a", 6 * len(kept))
    assert blocks is not None
    live = {}
    for number, some in enumerate(kept):
        merged = blocks[6 * number] // 6
        pool.free("a", blocks[6 * number + some : 6 * number + 6])
        live[merged] = some
    moves = pool.compact("b", count)
    fits = -(-sum(kept) // 6) + count <= len(kept)
    assert (moves is not None) == fits
    if moves is not None:
        assert len(moves) == fewest_copied(pool, live, 6, count)


def spread(pool: BlockPool, service: str, merged: int, per_merged: int) -> list[int]:
    """One live block in each of ``merged`` merged blocks."""
    blocks = pool.allocate(service, merged * per_merged)
    assert blocks is not None
    pool.free(service, [block for block in blocks if block % per_merged])
    return [block for block in blocks if block % per_merged == 0]


def test_the_emptiest_of_all_services_is_emptied() -> None:
    pool = make_pool({"a": 4, "b": 8, "c": 1}, 4)
    spread(pool, "a", 2, 4)
    b = spread(pool, "b", 2, 8)
    moves = pool.compact("c", 1)
    assert moves is not None
    assert [(move.service, move.source in b, move.target // 8) for move in moves] == [
        ("b", True, next(block for block in b if block != moves[0].source) // 8)
    ]


def test_where_free_slots_do_not_suffice_the_oldest_cached_blocks_are_evicted_and_no_more() -> None:
    pool = make_pool({"a": 4, "b": 1}, 2)
    blocks = pool.allocate("a", 8)
    assert blocks is not None
    first, *cached = blocks[:4]
    for block in cached:
        pool.publish("a", [block], [make_hash(block)])
    oldest_first = [cached[1], cached[0], cached[2]]
    for block in oldest_first:
        pool.free("a", [block])
    pool.free("a", blocks[5:])
    assert pool.compact("b", 1) == [BlockMove("a", blocks[4], oldest_first[0])]
    hashes = [make_hash(block) for block in oldest_first]
    assert cached_hashes(pool, "a", hashes) == set(hashes[1:])
    pool.check_integrity({"a": [[first, oldest_first[0]]]})


def test_free_slots_are_filled_before_cached_blocks_are_evicted() -> None:
    pool = make_pool({"a": 4, "b": 1}, 2)
    blocks = pool.allocate("a", 8)
    assert blocks is not None
    full = blocks[0] // 4
    pool.publish("a", [4 * full], [make_hash(1)])
    pool.free("a", [4 * full])
    pool.free("a", [4 * full + 1])
    pool.free("a", [block for block in blocks if block // 4 != full][1:])
    moves = pool.compact("b", 1)
    assert moves == [BlockMove("a", next(b for b in blocks if b // 4 != full), 4 * full + 1)]
    assert cached_hashes(pool, "a", [make_hash(1)]) == {make_hash(1)}


def test_a_shared_and_published_block_moves_once_with_all_its_references() -> None:
    pool = make_pool({"a": 4, "b": 1}, 2)
    left, right = spread(pool, "a", 2, 4)
    for block in (left, right):
        pool.publish("a", [block], [make_hash(block)])
        pool.share("a", [block])
    moves = pool.compact("b", 1)
    assert moves is not None
    (move,) = moves
    stays = left + right - move.source
    pool.check_integrity({"a": [[move.target, stays]] * 2})
    assert pool.match_prefix("a", [make_hash(move.source)]) == [move.target]


def test_merged_blocks_still_to_be_zeroed_are_not_packed() -> None:
    layout = make_merged_layout({"a": 4, "b": 1, "c": 4}, 2, {"b": "bfloat16", "c": "bfloat16"})
    pool = BlockPool(layout)
    everything = pool.allocate("b", 2)
    assert everything is not None
    pool.free("b", everything)
    pool.take_dirty()
    spread(pool, "a", 2, 4)
    assert not pool.can_compact("b", 1)
    assert pool.compact("b", 1) is None
    assert len(pool.take_dirty()) == 2
    assert pool.can_compact("b", 1)
    assert pool.compact("b", 1) is not None


@pytest.mark.parametrize("service", ["a", "b"])
def test_the_split_layout_has_nothing_to_compact(service: str) -> None:
    pool = make_split_pool(12)
    assert pool.allocate("a", 3) is not None
    assert pool.allocate("b", 2) is not None
    for count in range(9):
        assert pool.compact(service, count) is None
        assert not pool.can_compact(service, count)
