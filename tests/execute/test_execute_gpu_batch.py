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
    from shoal.execute.gpu.batch import StepNumbers

    sequences = SequenceTable()
    sequences.apply(
        plan(joined=(joined(0, [5, 6, 7, 8, 9], computed=1), joined(1, [3, 4], computed=1), joined(2, [7])))
    )
    rows = [sequences[number] for number in range(3)]
    sequences.advance([rows[2]], [1])  # its next token is sampled by a step in flight
    numbers = StepNumbers.of(sequences, rows, [3, 1, 1])
    slots = [row.slot for row in rows]
    assert numbers.ids.tolist() == [4, -1, 6, 7, 8]
    assert numbers.positions.tolist() == [1, 1, 1, 2, 3]
    assert numbers.slots.tolist() == [slots[1], slots[2], slots[0]]
    assert (numbers.starts.tolist(), numbers.firsts.tolist()) == ([0, 1, 2, 5], [1, 1, 1])
    assert (numbers.last.tolist(), numbers.decodes) == ([4, 0, 1], 2)
    of_tokens = [slots[1], slots[2], *[slots[0]] * 3]
    assert numbers.words().tolist() == [4, -1, 6, 7, 8, 1, 1, 1, 2, 3, *of_tokens, 2, 2]


def test_padding_has_no_slot_and_no_length(state: "SlotState") -> None:
    from shoal.execute.gpu.batch import StepNumbers

    sequences = SequenceTable()
    sequences.apply(plan(joined=(joined(0, [5, 6], computed=1), joined(1, [3], computed=0))))
    rows = [sequences[number] for number in range(2)]
    numbers = StepNumbers.of(sequences, rows, [1, 1])
    a, b = (row.slot for row in rows)
    words = numbers.words(4)
    assert words.reshape(4, 4).tolist() == [[6, 3, 0, 0], [1, 0, 0, 0], [a, b, -1, -1], [2, 1, 0, 0]]
    padded = numbers.inputs(torch.from_numpy(words), 4, state)
    plain = numbers.inputs(torch.from_numpy(numbers.words()), None, state)
    assert padded[0].tolist() == plain[0].tolist() == [6, 3]
    for name in ("positions", "table_rows", "lengths"):
        assert getattr(padded[1], name).tolist() == getattr(plain[1], name).tolist()
    assert padded[1].prompts is plain[1].prompts is None


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
    ids = state.ids(torch.tensor([-1, 5, -1], dtype=torch.int32), torch.tensor([7, 1, -1], dtype=torch.int32))
    assert ids.tolist() == [42, 5, int(state.next_ids[0])]
