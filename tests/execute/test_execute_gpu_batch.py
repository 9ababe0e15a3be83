"""Numbers of a step on their way to a GPU, and block tables that stay there."""

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from execute_builders import GREEDY, needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st

from at_hand import on_cpu
from hypothesis_profiles import examples
from shoal.core import NewSequence, StepPlan
from shoal.execute.sequences import SequenceTable

if TYPE_CHECKING:
    from shoal.execute.gpu.batch import SlotState

pytestmark = [needs_triton, on_cpu]


def plan(**changes: object) -> StepPlan:
    return StepPlan(number=0, service="a", seq_ids=(), new_tokens=(), sampled=(), **changes)  # type: ignore[arg-type]


def joined(number: int, tokens: list[int], blocks: tuple[int, ...] = (), computed: int = 0) -> NewSequence:
    return NewSequence(number, tokens, len(tokens), computed, blocks, GREEDY, seed=0)


def test_decodes_come_first_and_unknown_tokens_are_left_to_the_device() -> None:
    from shoal.execute.gpu.batch import StepNumbers, StepShape

    sequences = SequenceTable()
    sequences.apply(
        plan(joined=(joined(0, [5, 6, 7, 8, 9], computed=1), joined(1, [3, 4], computed=1), joined(2, [7])))
    )
    rows = [sequences[number] for number in range(3)]
    sequences.advance([rows[2]], [1])  # its next token is sampled by a step in flight
    numbers = StepNumbers.of(sequences, rows, [3, 1, 1], [2, 0])
    a, b, c = (row.slot for row in rows)
    assert numbers.ids.tolist() == [4, -1, 6, 7, 8]
    assert numbers.positions.tolist() == [1, 1, 1, 2, 3]
    assert numbers.slots.tolist() == [b, c, a, a, a]
    assert numbers.prompts.tolist() == [[a, 2, 3, 1]]
    assert (numbers.last.tolist(), numbers.sampled.tolist()) == ([4, 0, 1], [1, 4])
    assert numbers.shape == StepShape(tokens=5, decodes=2, sampled=2, prompts=1)
    unsampled = StepNumbers.of(sequences, rows, [3, 1, 1], [])
    assert unsampled.sampled.tolist() == [4]


@pytest.mark.parametrize("padded", [False, True])
def test_words_have_all_numbers_of_a_step(state: "SlotState", padded: bool) -> None:
    """Padding has no slot, no length and no tokens, and samples the first token."""
    from shoal.execute.gpu.batch import StepNumbers, StepShape

    sequences = SequenceTable()
    sequences.apply(
        plan(joined=(joined(0, [5, 6, 7], computed=1), joined(1, [3], computed=0), joined(2, [7])))
    )
    rows = [sequences[number] for number in range(3)]
    sequences.advance([rows[2]], [1])
    a, b, c = (row.slot for row in rows)
    state.next_ids[c] = 99
    numbers = StepNumbers.of(sequences, rows, [2, 1, 1], [1, 2, 0])
    shape = StepShape(tokens=7, decodes=5, sampled=4, prompts=2) if padded else numbers.shape
    words = numbers.words(shape)
    assert words.shape == (shape.words,)
    assert all(part.start % 4 == 0 for part in shape.parts)
    ids, sampled, inputs = state.inputs(torch.from_numpy(words), shape)

    def with_padding(values: list[int], size: int, value: int = 0) -> list[int]:
        return values + [value] * (size - len(values))

    assert ids.tolist() == with_padding([3, 99, 6, 7], shape.tokens)
    assert inputs.positions.tolist() == with_padding([0, 1, 1, 2], shape.tokens)
    assert inputs.table_rows.tolist() == with_padding([b, c, a, a], shape.tokens, -1)
    assert inputs.lengths.tolist() == with_padding([1, 2], shape.decodes)
    assert sampled.tolist() == with_padding([0, 1, 3], shape.sampled)
    assert inputs.prompts.tolist() == [[a, 2, 2, 1]] + [[0] * 4] * (shape.prompts - 1)
    assert inputs.tables is state.tables


@pytest.fixture
def state() -> "SlotState":
    from shoal.execute.gpu.batch import SlotState

    return SlotState(torch.device("cpu"))


changes = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 7), st.lists(st.integers(0, 99), min_size=0, max_size=3)),
    max_size=12,
)


@settings(max_examples=examples(60), deadline=None)
@given(steps=st.lists(changes, max_size=4), grown=st.booleans(), width=st.sampled_from([4, 10]))
def test_tables_on_the_device_are_those_of_the_host(
    steps: list[list[tuple[int, int, list[int]]]], grown: bool, width: int
) -> None:
    """Also if entries are set several times before they are sent, and if the tables grow. Entries for which
    there is no room are left out."""
    from shoal.execute.gpu.batch import SlotState, table_words

    state, expected = SlotState(torch.device("cpu")), np.zeros((6, 10), dtype=np.int64)
    state.grow(6, width)
    for number, changed in enumerate(steps):
        if grown and number == 1:
            state.grow(1000, 33)
            width = 10
        for slot, column, blocks in changed:
            expected[slot, column : column + len(blocks)] = blocks
        expected[:, width:] = 0
        words = table_words(changed, state.tables.shape[1])
        if len(words):
            state.put_tables(torch.from_numpy(words))
    assert state.tables[:6, :width, 0].tolist() == expected[:, :width].tolist()
    assert not state.tables[6:].any()


def test_growing_keeps_the_newest_tokens(state: "SlotState") -> None:
    state.next_ids[7] = 42
    assert state.fits(512, 1)
    assert not state.fits(513, 1)
    state.grow(513, 2)
    assert state.fits(1024, 2)
    assert state.next_ids[7] == 42
