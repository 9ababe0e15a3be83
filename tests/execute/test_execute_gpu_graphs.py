"""Replayed decode graphs give the logits of steps without graphs, for all numbers of rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from attention_builders import Sequences, Shape
from execute_builders import needs_triton
from graph_builders import FakeCapturer
from strict_interpreter import strict_interpreter

from at_hand import on_cpu
from shoal.execute.attention.torch_backends import ReferenceAttention
from shoal.execute.attention.transformers_hook import AttentionStep

if TYPE_CHECKING:
    from shoal.execute.gpu.batch import SlotState
    from shoal.execute.gpu.graphs import GraphBuffers

pytestmark = [needs_triton, on_cpu]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with strict_interpreter():
        yield


class Model:
    """One layer of attention and nothing else; token 100 + i is that of the i-th sequence."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.seen: list[torch.Tensor] = []
        """Token ids of all calls."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        assert len(rows) == input_ids.shape[1] == positions.shape[1]
        self.seen.append(input_ids[0].clone())
        shape, last = self.sequences.shape, [length - 1 for length in self.sequences.lengths]
        query, key, value = (
            torch.stack(
                [each[token - 100][last[token - 100]] if token else torch.full_like(each[0][0], 7.0)
                 for token in input_ids[0].tolist()]
            )
            for each in (self.sequences.queries, self.sequences.keys, self.sequences.values)
        )  # fmt: skip
        return step.attend(0, query, key, value, shape.spec).flatten(1)


class Recorded:
    """Sequences of which all but the last token are in the pool, and graphs of their decodes."""

    def __init__(
        self,
        lengths: list[int],
        shape: Shape,
        capturer: FakeCapturer,
        state: "SlotState",
        buffers: "GraphBuffers",
    ) -> None:
        from shoal.execute.gpu.graphs import DecodeGraphs

        self.sequences = Sequences(shape, lengths)
        self.sequences.store([length - 1 for length in lengths])
        self.model = Model(self.sequences)
        self.state = state
        self.graphs = DecodeGraphs(self.model, self.sequences.cache, state, buffers, capturer)

    def words(self, count: int, size: int, unknown: bool = False) -> torch.Tensor:
        """The last tokens of the first sequences, in slots 3, 2, ..."""
        from shoal.execute.gpu.batch import table_words

        slots = [3 - row for row in range(count)]
        tables = [(slot, 0, self.sequences.tables[row]) for row, slot in enumerate(slots)]
        self.state.put_tables(torch.from_numpy(table_words(tables, self.state.tables.shape[1])))
        ids = np.arange(100, 100 + count)
        if unknown:
            self.state.next_ids[slots] = torch.from_numpy(ids)
            ids[:] = -1
        words = np.zeros((4, size), dtype=np.int32)
        words[2] = -1
        lengths = np.array(self.sequences.lengths[:count])
        words[:, :count] = ids, lengths - 1, slots, lengths
        return torch.from_numpy(words.ravel())

    def expected(self, count: int) -> torch.Tensor:
        rows = [(row, length - 1, length) for row, length in enumerate(self.sequences.lengths[:count])]
        step = ReferenceAttention(self.sequences.step(rows), self.sequences.cache)
        return self.sequences.attend(step, rows).flatten(1)


@pytest.fixture
def state() -> "SlotState":
    from shoal.execute.gpu.batch import SlotState

    made = SlotState(CPU)
    made.grow(4, 20)
    return made


@pytest.fixture
def buffers() -> "GraphBuffers":
    from shoal.execute.gpu.graphs import GraphBuffers

    return GraphBuffers(CPU)


@pytest.mark.parametrize("unknown", [False, True])
def test_padding_rows_attend_nothing_and_write_nothing(
    state: "SlotState", buffers: "GraphBuffers", unknown: bool
) -> None:
    """Token ids may be known on the device only."""
    recorded = Recorded([9, 5, 2], Shape(), FakeCapturer(), state, buffers)
    pool = recorded.sequences.cache.rows
    before = pool.clone()
    logits = recorded.graphs.run(recorded.words(3, 4, unknown), 4)
    assert logits is not None
    stored = pool.clone()
    pool.copy_(before)
    torch.testing.assert_close(logits[:3], recorded.expected(3))
    assert not logits[3].any()
    torch.testing.assert_close(stored, pool, rtol=0, atol=0, equal_nan=True)
    assert [seen.tolist() for seen in recorded.model.seen] == [[100, 101, 102, 0]] * 2


@pytest.mark.parametrize(
    "error", [RuntimeError("it looks at a number"), torch.OutOfMemoryError("it is large")]
)
def test_a_size_whose_capture_failed_is_not_tried_again(
    error: Exception, state: "SlotState", buffers: "GraphBuffers"
) -> None:
    capturer = FakeCapturer(error)
    recorded = Recorded([9, 5, 2], Shape(), capturer, state, buffers)
    assert recorded.graphs.takes(4)
    assert recorded.graphs.run(recorded.words(3, 4), 4) is None
    assert not recorded.graphs.takes(4)
    assert recorded.graphs.run(recorded.words(2, 2), 2) is not None
    assert (recorded.graphs.sizes, capturer.tried) == ([2], 2)


def test_models_share_the_buffers_of_graphs(state: "SlotState", buffers: "GraphBuffers") -> None:
    """The second model has fewer heads, so fewer logits."""
    capturer = FakeCapturer()
    large = Recorded([60, 50, 40, 30], Shape(), capturer, state, buffers)
    small = Recorded([3, 2, 1], Shape(heads=2, kv_heads=1), capturer, state, buffers)
    for counts in ((4, 3), (1, 1), (2, 2), (4, 3)):
        for count, recorded in zip(counts, (large, small), strict=True):
            size = 4 if count > 2 else count
            logits = recorded.graphs.run(recorded.words(count, size), size)
            assert logits is not None
            torch.testing.assert_close(logits[:count], recorded.expected(count))
    outputs = [recorded.graphs.run(recorded.words(2, 2), 2) for recorded in (large, small)]
    assert outputs[0] is not None
    assert outputs[1] is not None
    assert outputs[0].data_ptr() == outputs[1].data_ptr()


def test_all_sizes_are_recorded_ahead_the_largest_first(state: "SlotState", buffers: "GraphBuffers") -> None:
    capturer = FakeCapturer()
    recorded = Recorded([9, 5, 2], Shape(), capturer, state, buffers)
    pool = recorded.sequences.cache.rows
    before = pool.clone()
    recorded.graphs.record(7)
    assert recorded.graphs.sizes == [1, 2, 4, 8]
    assert [len(seen) for seen in recorded.model.seen] == [8, 4, 2, 1]
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)
    logits = recorded.graphs.run(recorded.words(3, 4), 4)
    assert logits is not None
    torch.testing.assert_close(logits[:3], recorded.expected(3))
    assert capturer.tried == 4


def test_recording_ahead_ends_where_memory_does(state: "SlotState", buffers: "GraphBuffers") -> None:
    capturer = FakeCapturer(torch.OutOfMemoryError("it is large"))
    recorded = Recorded([9, 5, 2], Shape(), capturer, state, buffers)
    recorded.graphs.record(100_000)
    assert (recorded.graphs.sizes, capturer.tried) == ([], 1)
    assert not recorded.graphs.takes(256)
    assert recorded.graphs.takes(192)
