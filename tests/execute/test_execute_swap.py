"""Sequences whose KV is moved: to host memory and back, or together, go on as if nothing had happened."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from execute_builders import GREEDY, HandScheduler, make_model, make_prompt, reference_tokens, tiny_config

from at_hand import DEVICE
from shoal.core import BlockCopy, NewSequence, Service, StepPlan
from shoal.execute.attention.kv_buffers import KVStore
from shoal.execute.executors import make_executor
from shoal.execute.model.model_set import ModelSet, load_models
from shoal.kvcache import BlockMove, BlockPool, KVShape, LayerShape, PoolLayout, plan_layout

BLOCK = 4
DTYPES = {"a": "float32", "b": "bfloat16"}
PROMPT, OUTPUT = 22, 14
MERGED_BYTES = 6144


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("swap")
    kinds = {"a": "llama", "b": "qwen3"}
    return {name: make_model(root / name, tiny_config(kind)) for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> ModelSet:
    services = [Service(name=name, model=str(folders[name]), dtype=DTYPES[name]) for name in folders]
    return load_models(services, folders, device=DEVICE)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    """By service, the output for prompt ``PROMPT`` tokens long, alone and undisturbed."""
    alone = HandScheduler({"b": folders["b"]}, dtype=DTYPES["b"])
    outputs = {
        "a": reference_tokens(folders["a"], make_prompt(PROMPT, seed=1), OUTPUT),
        "b": alone.generate("b", [make_prompt(PROMPT, seed=3)], OUTPUT)[0],
    }
    assert all(len(set(tokens)) > 4 for tokens in outputs.values())
    return outputs


@dataclass
class Running:
    """One sequence: its tokens, its block table, and the tokens whose KV is in place."""

    service: str
    tokens: list[int]
    number: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[PROMPT:]


def cut(layout: PoolLayout, memory_bytes: int, per_merged: dict[str, int]) -> PoolLayout:
    """The merged layout with the given numbers of sub-blocks in each merged block."""
    views = {
        name: replace(view, stride_bytes=MERGED_BYTES // per_merged[name], blocks_per_merged=per_merged[name])
        for name, view in layout.services.items()
    }
    for view in views.values():
        assert view.stride_bytes % 256 == 0
        assert view.shape.block_bytes(BLOCK) <= view.stride_bytes
    return replace(
        layout, merged_bytes=MERGED_BYTES, merged_blocks=memory_bytes // MERGED_BYTES, services=views
    )


class Stepper:
    """Two services of different dtype in one small poisoned pool, a host pool, and plans made by hand."""

    def __init__(
        self,
        models: ModelSet,
        kind: str,
        memory_bytes: int,
        *,
        depth: int = 1,
        per_merged: dict[str, int] | None = None,
    ) -> None:
        self.layout = plan_layout(models.kv_shapes, memory_bytes=memory_bytes, block_size=BLOCK, kind=kind)
        if per_merged is not None:
            self.layout = cut(self.layout, memory_bytes, per_merged)
        self.pool = BlockPool(self.layout)
        host_layout = self.layout.resized(2 * memory_bytes)
        self.host = BlockPool(host_layout)
        split = kind == "split"
        self.executor = make_executor(
            models,
            self.layout,
            depth=depth,
            unit_ids=self.pool.unit_ids if split else None,
            host_layout=host_layout,
            host_unit_ids=self.host.unit_ids if split else None,
        )
        assert self.executor.store.host_buffer is not None
        self.executor.store.buffer.fill_(0xFF)
        self.executor.store.host_buffer.fill_(0xFF)
        self.numbers = 0

    def take(self, service: str, count: int) -> list[int]:
        blocks = self.pool.allocate(service, count)
        assert blocks is not None
        return blocks

    def join(self, one: Running, blocks: Sequence[int]) -> NewSequence:
        one.number, self.numbers = self.numbers, self.numbers + 1
        one.blocks = list(blocks)
        tokens = list(one.tokens)
        return NewSequence(one.number, tokens, PROMPT, one.computed, tuple(blocks), GREEDY, seed=0)

    def step(self, one: Running, joined: tuple[NewSequence, ...] = (), **parts: object) -> StepPlan:
        """Compute what is missing of one sequence and sample a token."""
        new = len(one.tokens) - one.computed
        plan = StepPlan(
            number=0,
            service=one.service,
            seq_ids=(one.number,),
            new_tokens=(new,),
            sampled=(0,),
            joined=joined,
            zero=self.pool.take_dirty(),
            **parts,  # type: ignore[arg-type]
        )
        self.executor.submit(plan)
        result = self.executor.collect()
        one.computed += new
        one.tokens.append(result.tokens[0][0])
        return plan

    def run(self, one: Running, until: int) -> None:
        while len(one.output) < until:
            self.step(one)

    def swap_out(self, one: Running) -> tuple[list[int], tuple[BlockCopy, ...]]:
        """Give up its blocks; the host blocks that take its KV, and the copies."""
        saved = self.host.allocate(one.service, -(-one.computed // BLOCK))
        assert saved is not None
        copies = tuple(
            BlockCopy(one.service, source, target, target_host=True)
            for source, target in zip(one.blocks, saved, strict=False)
        )
        self.pool.free(one.service, one.blocks)
        return saved, copies


def table_length(output: int = OUTPUT) -> int:
    return -(-(PROMPT + output) // BLOCK)


def started(stepper: Stepper, service: str, blocks: Sequence[int], until: int) -> Running:
    """A sequence of the service that has said ``until`` tokens."""
    one = Running(service, make_prompt(PROMPT, seed=1 if service == "a" else 3))
    joined = stepper.join(one, blocks)
    stepper.step(one, (joined,))
    stepper.run(one, until)
    return one


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["merged", "split"])
def test_swapped_out_overwritten_by_another_dtype_and_back(
    kind: str, depth: int, models: ModelSet, expected: dict[str, list[int]]
) -> None:
    stepper = Stepper(models, kind, 24 << 10, depth=depth)
    a = started(stepper, "a", stepper.take("a", table_length()), 5)
    first_blocks = a.blocks
    saved, copies_out = stepper.swap_out(a)

    everything = stepper.take("b", stepper.pool.max_blocks("b"))
    b = Running("b", make_prompt(PROMPT, seed=3))
    joined = stepper.join(b, everything[-table_length() :])
    plan = stepper.step(b, (joined,), left=(a.number,), swap_out_copies=copies_out)
    assert plan.zero
    stepper.run(b, OUTPUT)
    assert b.output == expected["b"]

    stepper.pool.free("b", everything)
    stepper.take("a", 1)
    blocks = stepper.take("a", table_length())
    assert blocks != first_blocks
    copies = tuple(
        BlockCopy("a", source, target, source_host=True)
        for source, target in zip(saved, blocks, strict=False)
    )
    joined = stepper.join(a, blocks)
    plan = stepper.step(a, (joined,), left=(b.number,), copies=copies)
    assert plan.zero
    assert plan.new_tokens == (1,)
    stepper.run(a, OUTPUT)
    assert a.output == expected["a"]
    stepper.executor.close()


@pytest.mark.parametrize("kind", ["merged", "split"])
def test_freed_blocks_may_be_reused_in_the_same_plan(
    kind: str, models: ModelSet, expected: dict[str, list[int]]
) -> None:
    stepper = Stepper(models, kind, 40 << 10)
    a = started(stepper, "a", stepper.take("a", table_length()), 6)
    units = stepper.pool.unit_ids("a", a.blocks).tolist() if kind == "split" else []
    saved, copies_out = stepper.swap_out(a)
    stepper.take("b", 2)
    again = stepper.take("a", table_length())
    assert set(again) & set(a.blocks)
    if kind == "split":
        assert stepper.pool.unit_ids("a", a.blocks).tolist() != units
    other = Running("a", make_prompt(PROMPT, seed=1))
    joined = stepper.join(other, again)
    stepper.step(other, (joined,), left=(a.number,), swap_out_copies=copies_out)
    stepper.run(other, OUTPUT)
    assert other.output == expected["a"]

    # One out and the other back in, through the same plan.
    saved_other, copies_out = stepper.swap_out(other)
    assert not set(saved_other) & set(saved)
    blocks = stepper.take("a", table_length())
    copies = tuple(
        BlockCopy("a", source, target, source_host=True)
        for source, target in zip(saved, blocks, strict=False)
    )
    joined = stepper.join(a, blocks)
    stepper.step(a, (joined,), left=(other.number,), swap_out_copies=copies_out, copies=copies)
    stepper.run(a, OUTPUT)
    assert a.output == expected["a"]


def compacted(moves: Sequence[BlockMove], running: Sequence[Running]) -> dict[str, object]:
    """Rename the blocks in the tables; the plan's part in it."""
    moved = []
    for one in running:
        renamed = {move.source: move.target for move in moves if move.service == one.service}
        if renamed.keys() & set(one.blocks):
            one.blocks = [renamed.get(block, block) for block in one.blocks]
            moved.append((one.number, tuple(one.blocks)))
    swap_out_copies = tuple(BlockCopy(move.service, move.source, move.target) for move in moves)
    return {"swap_out_copies": swap_out_copies, "moved": tuple(moved)}


def test_a_compaction_for_another_dtype_changes_no_token(
    models: ModelSet, expected: dict[str, list[int]]
) -> None:
    stepper = Stepper(models, "merged", 6 * MERGED_BYTES, per_merged={"a": 4, "b": 8})
    pool = stepper.pool
    everything = stepper.take("a", pool.max_blocks("a"))
    table = [block for block in everything if block % 4 == 1]
    table.append(table[0] + 1)
    a = started(stepper, "a", table, 5)
    pool.free("a", sorted(set(everything) - set(table)))

    count = 3 * 8 + 1
    assert pool.allocate("b", count) is None
    moves = pool.compact("b", count)
    assert moves is not None
    assert len(moves) == 4
    parts = compacted(moves, [a])
    fresh = stepper.take("b", count)
    b = Running("b", make_prompt(PROMPT, seed=3))
    joined = stepper.join(b, fresh[-table_length() :])
    plan = stepper.step(b, (joined,), **parts)
    assert len(plan.zero) == 4
    assert len(plan.moved) == 1
    stepper.run(b, OUTPUT)
    assert b.output == expected["b"]

    pool.free("b", fresh)
    more = stepper.take("a", table_length() - len(table))
    a.blocks += more
    stepper.step(a, left=(b.number,), grown=((a.number, tuple(more)),))
    stepper.run(a, OUTPUT)
    assert a.output == expected["a"]


SHAPES = {
    "x": KVShape("float32", (LayerShape(2, 8, 8),)),
    "y": KVShape("float16", (LayerShape(1, 16, 8),) * 3),
}


def stores(kind: str) -> tuple[BlockPool, BlockPool, KVStore]:
    layout: PoolLayout = plan_layout(SHAPES, memory_bytes=20_000, block_size=2, kind=kind)
    pool, host = BlockPool(layout), BlockPool(layout.resized(40_000))
    split = kind == "split"
    store = KVStore(
        layout,
        torch.device("cpu"),
        pool.unit_ids if split else None,
        host.layout,
        host.unit_ids if split else None,
    )
    return pool, host, store


def fill(store: KVStore, service: str, block: int, value: float) -> None:
    cache = store.services[service]
    cache.rows[cache.row_indices([block])[0]] = value


def content(store: KVStore, service: str, block: int) -> set[float]:
    cache = store.services[service]
    return set(cache.rows[cache.row_indices([block])[0]].flatten().tolist())


@pytest.mark.parametrize("service", ["x", "y"])
@pytest.mark.parametrize("kind", ["merged", "split"])
def test_copies_run_in_order(kind: str, service: str) -> None:
    pool, host, store = stores(kind)
    blocks, saved = pool.allocate(service, 4), host.allocate(service, 2)
    assert blocks is not None
    assert saved is not None
    for value, block in enumerate(blocks):
        fill(store, service, block, value)
    first, second, third, fourth = blocks
    store.copy_all(
        [
            BlockCopy(service, first, second),
            BlockCopy(service, second, third),
            BlockCopy(service, third, saved[0], target_host=True),
            BlockCopy(service, saved[0], saved[1], source_host=True, target_host=True),
            BlockCopy(service, fourth, first),
            BlockCopy(service, saved[1], fourth, source_host=True),
        ]
    )
    assert [content(store, service, block) for block in blocks] == [{3.0}, {0.0}, {0.0}, {0.0}]


@pytest.mark.parametrize("kind", ["merged", "split"])
def test_located_addresses_stay_valid_while_the_pool_changes(kind: str) -> None:
    pool, host, store = stores(kind)
    blocks, saved = pool.allocate("x", 4), host.allocate("x", 4)
    assert blocks is not None
    assert saved is not None
    pool.take_dirty()
    for value, block in enumerate(blocks):
        fill(store, "x", block, value)
    pool.free("x", blocks)
    assert pool.allocate("y", 1) is not None
    assert pool.allocate("x", 3) is not None
    pool.take_dirty()
    out = store.locate(
        BlockCopy("x", source, target, target_host=True) for source, target in zip(blocks, saved, strict=True)
    )
    assert pool.allocate("x", 1) is not None
    pool.take_dirty()
    for transfer in out:
        transfer.run()
    back = pool.allocate("x", 4)
    assert back is not None
    store.copy_all(
        BlockCopy("x", source, target, source_host=True) for source, target in zip(saved, back, strict=True)
    )
    assert [content(store, "x", block) for block in back] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_swapping_needs_a_host_layout() -> None:
    layout = plan_layout(SHAPES, memory_bytes=20_000, block_size=2)
    store = KVStore(layout, torch.device("cpu"))
    assert store.host_buffer is None
    with pytest.raises(ValueError, match="host_layout"):
        store.copy(BlockCopy("x", 0, 0, target_host=True))
    split = plan_layout(SHAPES, memory_bytes=20_000, block_size=2, kind="split")
    pool = BlockPool(split)
    with pytest.raises(ValueError, match="unit_ids"):
        KVStore(split, torch.device("cpu"), pool.unit_ids, split.resized(20_000))


def test_services_that_do_not_change_keep_their_views() -> None:
    """What was written down of the addresses in one, as of recorded steps, holds."""
    layout = plan_layout(SHAPES, memory_bytes=20_000, block_size=2)
    store = KVStore(layout, torch.device("cpu"))
    before = dict(store.services)
    store.lay_out(replace(layout, services={"x": layout.services["x"]}), None)
    assert store.services == {"x": before["x"]}
    store.lay_out(layout, None)
    assert store.services["x"] is before["x"]
    assert store.services.keys() == before.keys()
    store.lay_out(layout.resized(10_000), None)
    assert store.services["x"] is not before["x"]
