"""Eviction order of cached blocks, against a naive implementation."""

import random
from collections import defaultdict
from copy import deepcopy

import pytest
from kvcache_builders import make_hash, make_pool

from shoal.kvcache import BlockPool

PER_MERGED = {"a": 4, "b": 3, "c": 1}
MERGED = 6


class NaiveEviction:
    """Every live and cached block in plain dicts; everything else is counted when needed."""

    def __init__(self) -> None:
        self.live: dict[tuple[str, int], bool] = {}
        self.cached: dict[tuple[str, int], int] = {}
        self.clock = 0

    def contents(self, service: str) -> dict[int, list[int]]:
        by_merged = defaultdict(list)
        for name, block in (*self.live, *self.cached):
            if name == service:
                by_merged[block // PER_MERGED[service]].append(block)
        return by_merged

    def available(self, service: str) -> int:
        held = {name: self.contents(name) for name in PER_MERGED}
        free = MERGED - sum(map(len, held.values()))
        per_merged = PER_MERGED[service]
        return free * per_merged + sum(per_merged - len(used) for used in held[service].values())

    def evictable(self, service: str) -> list[tuple[int, list[tuple[str, int]]]]:
        """(tick of last use, blocks evicted together) of everything that may be evicted for ``service``."""
        choices = [(tick, [key]) for key, tick in self.cached.items() if key[0] == service]
        for name in PER_MERGED:
            if name != service:
                for blocks in self.contents(name).values():
                    keys = [(name, block) for block in blocks]
                    if all(key in self.cached for key in keys):
                        choices.append((max(self.cached[key] for key in keys), keys))
        return choices

    def make_room(self, service: str, count: int) -> bool:
        before = dict(self.cached)
        while self.available(service) < count:
            choices = self.evictable(service)
            if not choices:
                self.cached = before
                return False
            for key in min(choices)[1]:
                del self.cached[key]
        return True

    def free(self, service: str, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if self.live.pop((service, block)):
                self.clock += 1
                self.cached[service, block] = self.clock


def still_cached(pool: BlockPool, hashes: dict[tuple[str, int], bytes]) -> set[tuple[str, int]]:
    """Blocks that are still found by their last hash; changes the order of last use."""
    found = set()
    for (service, block), block_hash in hashes.items():
        matched = pool.match_prefix(service, [block_hash])
        if matched:
            found.add((service, matched[0]))
            assert matched == [block]
            pool.free(service, matched)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_evictions_follow_the_rule(seed: int) -> None:
    pool, naive, draw = make_pool(PER_MERGED, MERGED), NaiveEviction(), random.Random(seed)
    tables: list[tuple[str, list[int]]] = []
    hashes: dict[tuple[str, int], bytes] = {}
    for step in range(250):
        action = draw.random()
        if tables and action < 0.45:
            service, table = tables.pop(draw.randrange(len(tables)))
            pool.free(service, table)
            naive.free(service, table)
        elif naive.cached and action < 0.55:
            service, block = draw.choice(sorted(naive.cached))
            assert pool.match_prefix(service, [hashes[service, block]]) == [block]
            del naive.cached[service, block]
            naive.live[service, block] = True
            tables.append((service, [block]))
        else:
            service, count = draw.choice(sorted(PER_MERGED)), draw.randrange(1, 7)
            possible = naive.make_room(service, count)
            table = pool.allocate(service, count)
            assert (table is not None) == possible
            if table is None:
                continue
            tables.append((service, table))
            for place, block in enumerate(table):
                hashed = draw.random() < 0.8
                assert (service, block) not in naive.live
                assert (service, block) not in naive.cached
                naive.live[service, block] = hashed
                if hashed:
                    hashes[service, block] = make_hash(1000 * step + place)
                    pool.publish(service, [block], [hashes[service, block]])
                else:
                    hashes.pop((service, block), None)
        pool.check_integrity()
        published = {key for key, hashed in naive.live.items() if hashed}
        assert still_cached(deepcopy(pool), hashes) == published | naive.cached.keys()
