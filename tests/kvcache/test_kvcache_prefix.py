"""Block hashes and the prefix index."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcache_builders import cached_hashes, make_hash, make_pool, make_split_pool

from shoal.kvcache import PrefixIndex, hash_blocks, hash_next, hash_synthetic

tokens = st.lists(st.integers(0, 3), max_size=12)


@given(tokens, tokens, st.integers(1, 4))
def test_hashes_are_equal_exactly_where_the_prefixes_are(
    left: list[int], right: list[int], size: int
) -> None:
    left_hashes, right_hashes = hash_blocks(left, size), hash_blocks(right, size)
    assert len(left_hashes) == len(left) // size
    for number, (left_hash, right_hash) in enumerate(zip(left_hashes, right_hashes, strict=False), start=1):
        assert (left_hash == right_hash) == (left[: number * size] == right[: number * size])


@given(tokens, st.integers(1, 4), st.integers(0, 3))
def test_hashing_may_go_on_from_a_parent(prompt: list[int], size: int, known: int) -> None:
    whole = hash_blocks(prompt, size)
    known = min(known, len(whole))
    parent = whole[known - 1] if known else b""
    assert whole[known:] == hash_blocks(prompt[known * size :], size, parent)
    step_by_step = []
    for number in range(known, len(whole)):
        parent = hash_next(parent, prompt[number * size : (number + 1) * size])
        step_by_step.append(parent)
    assert step_by_step == whole[known:]


def test_hashes_do_not_depend_on_the_container_and_take_large_tokens() -> None:
    assert hash_blocks((1, 2, 3, 4), 2) == hash_blocks([1, 2, 3, 4], 2)
    assert len(hash_blocks([2**31, 0], 1)) == 2
    assert all(len(block_hash) == 16 for block_hash in hash_blocks(range(64), 16))


def test_synthetic_hashes_follow_their_numbers_and_never_meet_those_of_tokens() -> None:
    left, right = hash_synthetic((1, 2, -(2**70))), hash_synthetic((1, 3))
    assert left[0] == right[0]
    assert len({*left, *right}) == 4
    assert not set(hash_synthetic(range(100))) & {hash_next(b"", [token]) for token in range(100)}


def test_the_index_evicts_the_least_recently_used_first() -> None:
    index = PrefixIndex()
    for block in (7, 8, 9):
        assert index.publish([block], [make_hash(block)])
    for tick, block in enumerate((8, 7, 9)):
        index.add_cached([block], tick)
    index.remove_cached(8)
    index.add_cached([8], 3)
    assert index.oldest() == (7, 1)
    index.evict(7)
    assert index.oldest() == (9, 2)
    assert index.longest_prefix([make_hash(8), make_hash(7), make_hash(9)]) == [8]


class NaivePrefixCache:
    """A prefix cache of ``size`` blocks in its simplest form, by hashes alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.references: dict[bytes, int] = {}
        self.unhashed = 0
        self.cached: list[bytes] = []

    def fits(self, count: int) -> bool:
        live = self.unhashed + sum(1 for count in self.references.values() if count)
        return live + count <= self.size

    def allocate(self, count: int) -> None:
        self.unhashed += count
        while self.unhashed + len(self.references) > self.size:
            del self.references[self.cached.pop(0)]

    def publish(self, block_hash: bytes) -> bool:
        if block_hash in self.references:
            return False
        self.unhashed -= 1
        self.references[block_hash] = 1
        return True

    def match(self, hashes: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for block_hash in hashes:
            if block_hash not in self.references:
                break
            if block_hash in self.cached:
                self.cached.remove(block_hash)
            self.references[block_hash] += 1
            found.append(block_hash)
        return found

    def free(self, table: list[bytes | None]) -> None:
        for block_hash in reversed(table):
            if block_hash is None:
                self.unhashed -= 1
                continue
            self.references[block_hash] -= 1
            if not self.references[block_hash]:
                self.cached.append(block_hash)


@pytest.mark.parametrize("layout", ["merged", "merged by four", "split"])
@pytest.mark.parametrize("seed", range(8))
def test_one_service_behaves_like_a_naive_prefix_cache(layout: str, seed: int) -> None:
    pools = {
        "merged": lambda: make_pool({"a": 1}, 12),
        "merged by four": lambda: make_pool({"a": 4}, 3),
        "split": lambda: make_split_pool(24),
    }
    pool, naive, draw = pools[layout](), NaivePrefixCache(12), random.Random(seed)
    running: list[tuple[list[int], list[bytes | None]]] = []
    for _ in range(300):
        if running and draw.random() < 0.45:
            blocks, known = running.pop(draw.randrange(len(running)))
            pool.free("a", blocks)
            naive.free(known)
        else:
            prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 7))]
            hashes = hash_blocks(prompt, 1)
            blocks = pool.match_prefix("a", hashes)
            known = list(naive.match(hashes))
            assert len(blocks) == len(known)
            missing = len(hashes) - len(blocks)
            fresh = pool.allocate("a", missing)
            assert (fresh is not None) == naive.fits(missing)
            if fresh is None:
                pool.free("a", blocks)
                naive.free(known)
                continue
            naive.allocate(missing)
            for block, block_hash in zip(fresh, hashes[len(blocks) :], strict=True):
                pool.publish("a", [block], [block_hash])
                known.append(block_hash if naive.publish(block_hash) else None)
            running.append((blocks + fresh, known))
        pool.check_integrity({"a": [blocks for blocks, _ in running]})
        assert pool.usage().services["a"].cached_blocks == len(naive.cached)
    live = [block_hash for block_hash, count in naive.references.items() if count]
    everything = [
        hash_blocks([n >> i & 1 for i in range(size)], 1)[-1] for size in range(1, 7) for n in range(64)
    ]
    assert cached_hashes(pool, "a", everything) == set(live) | set(naive.cached)
