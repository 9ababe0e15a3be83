"""Random sequences of pool operations, against a buffer that detects every overlap."""

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvcache_builders import StampedBuffer, make_merged_layout, make_shape

from hypothesis_profiles import examples
from shoal.core import ConfigError
from shoal.kvcache import (
    BlockPool,
    IntegrityError,
    KVShape,
    LayerShape,
    PoolLayout,
    extend_layout,
    hash_blocks,
    keeps_blocks,
    plan_layout,
    reduce_layout,
)

SHAPES: Mapping[str, KVShape] = {
    "a": make_shape(layers=2, dim=32),
    "b": make_shape(layers=3, kv_heads=2, dim=16, dtype="bfloat16"),
    "c": KVShape("float16", (LayerShape(2, 24, 8), LayerShape(1, 40, 32))),
    "d": make_shape(layers=5, dim=64),
}
PER_MERGED = [{"a": 4, "b": 3}, {"a": 1, "b": 5, "c": 2}, {"a": 6, "b": 4, "c": 1, "d": 9}]
DTYPES = {"b": "bfloat16", "d": "float16"}


@st.composite
def layouts(draw: st.DrawFn, kind: str) -> PoolLayout:
    if kind == "merged" and draw(st.booleans()):
        return make_merged_layout(draw(st.sampled_from(PER_MERGED)), draw(st.integers(1, 6)), DTYPES)
    names = sorted(SHAPES)[: draw(st.integers(2, 4))]
    shapes = {name: SHAPES[name] for name in names}
    return plan_layout(shapes, memory_bytes=draw(st.integers(7_000, 40_000)), block_size=2, kind=kind)


@dataclass
class Table:
    """A running sequence: its tokens, its blocks, and how many tokens have been written."""

    service: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    written: int = 0


class PoolMachine(RuleBasedStateMachine):
    """Sequences that join (with prefix hits), grow, fork, publish and end, as a scheduler would do it."""

    kind = "merged"

    @initialize(data=st.data(), prefix_caching=st.sampled_from([True, True, False]))
    def start(self, data: st.DataObject, prefix_caching: bool) -> None:
        self.layout = data.draw(layouts(self.kind))
        self.pool = BlockPool(self.layout, prefix_caching)
        self.names = sorted(self.layout.services)
        self.buffer = StampedBuffer(self.pool)
        self.running: list[Table] = []
        self.generation = 0
        """Increases when a service is removed or all prefixes are dropped: earlier prefixes must not be
        found."""
        self.forgotten: dict[str, int] = {}

    def allocate(self, service: str, count: int) -> list[int] | None:
        """Allocate; checks that ``can_allocate`` agrees, and that a failure changes nothing."""
        possible = self.pool.can_allocate(service, count)
        before = self.pool.usage()
        blocks = self.pool.allocate(service, count)
        assert (blocks is not None) == possible
        if blocks is None:
            assert self.pool.usage() == before
        else:
            assert len(blocks) == len(set(blocks)) == count
            assert all(0 <= block < self.pool.max_blocks(service) for block in blocks)
        return blocks

    def write(self, table: Table) -> None:
        """Write all tokens not written yet, copying shared blocks first; publish blocks that are full."""
        size = self.pool.block_size
        hashes = hash_blocks(table.tokens, size)
        for place in range(table.written // size, len(table.blocks)):
            block = table.blocks[place]
            assert not self.pool.is_shared(table.service, block)
            self.buffer.write(table.service, block, self.content(table, place))
            if place < len(hashes):
                self.pool.publish(table.service, [block], [hashes[place]])
        table.written = len(table.tokens)

    def content(self, table: Table, place: int) -> object:
        since = self.forgotten.get(table.service, 0)
        return table.service, since, tuple(table.tokens[: (place + 1) * self.pool.block_size])

    def end(self, table: Table) -> None:
        self.running = [other for other in self.running if other is not table]
        self.pool.free(table.service, table.blocks)

    @rule(number=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def join(self, number: int, tokens: list[int]) -> None:
        service = self.names[number % len(self.names)]
        size = self.pool.block_size
        table = Table(service, tokens)
        table.blocks = self.pool.match_prefix(service, hash_blocks(tokens, size))
        table.written = len(table.blocks) * size
        for place, block in enumerate(table.blocks):
            assert self.buffer.holds(service, block, self.content(table, place))
        fresh = self.allocate(service, -(-len(tokens) // size) - len(table.blocks))
        if fresh is None:
            self.pool.free(service, table.blocks)
            return
        table.blocks += fresh
        self.write(table)
        self.running.append(table)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, number: int, tokens: list[int]) -> None:
        table = self.running[number % len(self.running)]
        size = self.pool.block_size
        place = table.written // size
        partial = table.written % size != 0
        copy = partial and self.pool.is_shared(table.service, table.blocks[place])
        needed = -(-(len(table.tokens) + len(tokens)) // size) - len(table.blocks)
        fresh = self.allocate(table.service, needed + copy)
        if fresh is None:
            return
        if copy:
            self.pool.free(table.service, [table.blocks[place]])
            table.blocks[place] = fresh.pop()
        table.tokens = table.tokens + tokens
        table.blocks += fresh
        self.write(table)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def fork(self, number: int) -> None:
        table = self.running[number % len(self.running)]
        self.pool.share(table.service, table.blocks)
        self.running.append(Table(table.service, table.tokens, list(table.blocks), table.written))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def finish(self, number: int) -> None:
        self.end(self.running[number % len(self.running)])

    @rule(number=st.integers(0, 3))
    def fill(self, number: int) -> None:
        """Allocation succeeds up to a limit, and fails above it."""
        service = self.names[number % len(self.names)]
        limit = self.pool.max_blocks(service)
        possible = [self.pool.can_allocate(service, count) for count in range(limit + 2)]
        most = possible.index(False) - 1
        assert not any(possible[most + 1 :])
        trial = deepcopy(self.pool)
        assert trial.allocate(service, most + 1) is None
        assert trial.allocate(service, most) is not None
        trial.check_integrity()

    def lay_out(self, layout: PoolLayout) -> None:
        self.pool.lay_out(layout)
        self.layout, self.names = layout, sorted(layout.services)

    @precondition(lambda self: self.kind == "merged")
    @rule(number=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), min_size=2, max_size=9))
    def add_service(self, number: int, tokens: list[int]) -> None:
        """Add a service within the existing merged blocks; other services' blocks do not change."""
        name = sorted(SHAPES)[number]
        extended = None
        if name not in self.names:
            extended = extend_layout(self.layout, name, SHAPES[name])
        if extended is not None:
            before = self.pool.usage()
            self.lay_out(extended)
            after = self.pool.usage()
            assert after.free_merged == before.free_merged
            assert {**before.services, name: after.services[name]} == after.services
            self.join(self.names.index(name), tokens)

    @precondition(lambda self: self.kind == "merged")
    @rule(number=st.integers(0, 3))
    def remove_service(self, number: int) -> None:
        """Remove a service without live blocks, and its cached blocks."""
        name = self.names[number % len(self.names)]
        if len(self.names) == 1:
            return
        if self.pool.live_blocks(name):
            with pytest.raises(IntegrityError, match="live blocks"):
                self.pool.lay_out(reduce_layout(self.layout, name))
            return
        self.forget([name])
        self.lay_out(reduce_layout(self.layout, name))

    @precondition(lambda self: self.kind == "merged")
    @rule(memory=st.integers(7_000, 40_000))
    def replace_layout(self, memory: int) -> None:
        """Another layout over at most the same bytes, after all blocks were freed."""
        for table in list(self.running):
            self.end(table)
        shapes = {name: self.layout.services[name].shape for name in self.names}
        with suppress(ConfigError):
            layout = plan_layout(shapes, memory_bytes=min(memory, self.buffer.size), block_size=2)
            if not keeps_blocks(self.layout, layout):
                self.forget(self.names)
            self.lay_out(layout)

    def forget(self, names: list[str]) -> None:
        self.generation += 1
        self.forgotten |= dict.fromkeys(names, self.generation)
        for name in names:
            assert not [table for table in self.running if table.service == name]

    @invariant()
    def state_is_consistent(self) -> None:
        tables = {
            name: [table.blocks for table in self.running if table.service == name] for name in self.names
        }
        self.pool.check_integrity(tables)
        usage = self.pool.usage()
        for name in self.names:
            used = usage.services[name]
            assert (
                used.live_blocks == self.pool.live_blocks(name) == len({b for t in tables[name] for b in t})
            )
            view = self.layout.services[name]
            if self.kind == "merged":
                sub_blocks = used.live_blocks + used.cached_blocks + used.free_blocks
                assert sub_blocks == used.merged_blocks * view.blocks_per_merged
            else:
                assert used.merged_blocks == (used.live_blocks + used.cached_blocks) * view.units_per_block
        held = sum(used.merged_blocks for used in usage.services.values())
        assert usage.free_merged + held == usage.capacity == self.layout.merged_blocks

    @invariant()
    def live_content_is_intact(self) -> None:
        for table in self.running:
            for place, block in enumerate(table.blocks):
                assert self.buffer.holds(table.service, block, self.content(table, place))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for table in list(self.running):
            self.end(table)
        self.pool.check_integrity({})
        for name in self.names:
            assert self.pool.can_allocate(name, self.pool.max_blocks(name))
            everything = self.pool.allocate(name, self.pool.max_blocks(name))
            assert everything is not None
            self.pool.free(name, everything)
        usage = self.pool.usage()
        assert usage.free_merged == usage.capacity
        assert usage.live_bytes == 0


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["merged", "split"])
def test_state_is_consistent_and_no_content_is_overwritten(kind: str) -> None:
    machine = type(f"{kind.title()}Machine", (PoolMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(100),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
