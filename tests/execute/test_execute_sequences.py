"""The arrays of the running group say after any deltas what a list for each sequence says."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypothesis_profiles import examples
from shoal.core import NewSequence, SamplingParams, StepPlan, uniform
from shoal.execute.attention.kv_buffers import KVStore
from shoal.execute.attention.kv_views import ServiceCache
from shoal.execute.batch import StepBatch, build_batch
from shoal.execute.sequences import SequenceTable
from shoal.kvcache import KVShape, LayerShape, plan_layout

pytestmark = pytest.mark.without_native

BLOCK = 4

blocks = st.lists(st.integers(0, 99), max_size=9)


def make_cache() -> ServiceCache:
    shape = KVShape("float32", (LayerShape(1, 1, 1),))
    layout = plan_layout({"a": shape}, memory_bytes=1 << 12, block_size=BLOCK)
    return KVStore(layout, torch.device("cpu")).services["a"]


def make_plan(**deltas: object) -> StepPlan:
    return StepPlan(number=0, service="a", seq_ids=(), new_tokens=(), sampled=(), **deltas)


def joining(number: int, tokens: int, computed: int, table: list[int]) -> NewSequence:
    ids = [100 * number + token for token in range(tokens)]
    return NewSequence(number, ids, tokens, computed, tuple(table), SamplingParams(), seed=0)


@dataclass
class Known:
    """One sequence in lists."""

    computed: int
    table: list[int] = field(default_factory=list)


class Deltas(RuleBasedStateMachine):
    """Plans that change the sequences, compared with a dictionary of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = SequenceTable()
        self.known: dict[int, Known] = {}
        self.number = 0

    @rule(table=blocks, computed=st.integers(0, 50), leaving=st.integers(0, 3))
    def join_and_leave(self, table: list[int], computed: int, leaving: int) -> None:
        left = tuple(self.known)[:leaving]
        for number in left:
            del self.known[number]
        joined = joining(self.number, 60, computed, table)
        # One that is not known may leave: it never joined here.
        self.groups.apply(make_plan(left=(*left, 1000), joined=(joined,)))
        self.known[self.number] = Known(computed, list(table))
        self.number += 1

    @rule(data=st.data(), more=blocks)
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        if self.known:
            number = data.draw(st.sampled_from(sorted(self.known)))
            self.groups.apply(make_plan(grown=((number, tuple(more)),)))
            self.known[number].table += more

    @rule(data=st.data(), moved=blocks, more=blocks)
    def move_and_grow(self, data: st.DataObject, moved: list[int], more: list[int]) -> None:
        if self.known:
            number = data.draw(st.sampled_from(sorted(self.known)))
            deltas = {"moved": ((number, tuple(moved)),), "grown": ((number, tuple(more)),)}
            self.groups.apply(make_plan(**deltas))
            self.known[number].table = [*moved, *more]

    @rule(counts=st.lists(st.integers(1, 5), max_size=4))
    def compute(self, counts: list[int]) -> None:
        numbers = list(self.known)[: len(counts)]
        if numbers:
            self.groups.advance([self.groups[number] for number in numbers], counts[: len(numbers)])
        for number, count in zip(numbers, counts, strict=False):
            self.known[number].computed += count

    @invariant()
    def same(self) -> None:
        groups = self.groups
        assert set(groups.sequences) == set(self.known)
        for number, known in self.known.items():
            slot = groups[number].slot
            assert groups.tables[slot, : groups.num_blocks[slot]].tolist() == known.table
            assert groups.computed[slot] == known.computed
        assert len({row.slot for row in groups.sequences.values()}) == len(self.known)


Deltas.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=20)
TestDeltas = Deltas.TestCase


def batch_of(sequences: list[tuple[int, int]]) -> StepBatch:
    """A step over (computed, new tokens) of sequences 0, 1, ...; token t of sequence s is 100 s + t."""
    groups = SequenceTable()
    joined = tuple(
        joining(number, 60, computed, [10 * number + block for block in range(60 // BLOCK)])
        for number, (computed, _) in enumerate(sequences)
    )
    groups.apply(make_plan(joined=joined))
    rows = [groups[number] for number in range(len(sequences))]
    return build_batch(groups, rows, [count for _, count in sequences], make_cache())


def test_decodes_come_first_longest_first() -> None:
    batch = batch_of([(4, 3), (8, 1), (0, 2), (30, 1), (9, 1)])
    assert batch.num_decodes == 3
    assert batch.input_ids.tolist() == [[330, 409, 108, 4, 5, 6, 200, 201]]
    assert batch.positions.tolist() == [[30, 9, 8, 4, 5, 6, 0, 1]]
    assert batch.starts.tolist() == [0, 1, 2, 3, 6, 8]
    assert batch.firsts.tolist() == [30, 9, 8, 4, 0]
    assert batch.ends.tolist() == [31, 10, 9, 7, 2]
    assert batch.last.tolist() == [5, 2, 7, 0, 1]
    assert batch.tables[:, 0].tolist() == [30, 40, 10, 0, 20]
    assert batch.tables.shape == (5, 31 // BLOCK + 1)
    assert np.array_equal(batch.tables[0], np.arange(30, 38))


def test_table_entries_beyond_a_rows_blocks_are_its_own() -> None:
    batch = batch_of([(30, 1), (9, 1), (4, 3)])
    assert batch.tables[1].tolist() == [10, 11, 12, 10, 10, 10, 10, 10]
    assert batch.tables[2].tolist() == [20, 21, 20, 20, 20, 20, 20, 20]


def test_no_rows_can_be_advanced() -> None:
    sequences = SequenceTable()
    sequences.advance([], [])
    assert sequences.computed.tolist() == [0]


def test_draws_depend_on_the_seed_and_the_number_of_the_output() -> None:
    """Those that `shoal.core.uniform` gives, whatever was in the slots before."""
    sequences = SequenceTable()
    seeds = (0, 7, 2**63, 2**64 - 1, -5)
    for left in (False, True):
        joined = tuple(
            NewSequence(at, [1] * 9, 9 - at, 9 + at, (), SamplingParams(), seed=seed + left)
            for at, seed in enumerate(seeds)
        )
        sequences.apply(make_plan(left=tuple(range(5)) if left else (), joined=joined))
        slots = [sequences[at].slot for at in range(5)]
        expected = [uniform(seed + left, 2 * at) for at, seed in enumerate(seeds)]
        assert sequences.draws(slots).tolist() == expected
    assert sequences.draws([]).tolist() == []
