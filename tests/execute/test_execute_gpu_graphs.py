"""Replayed graphs give the logits of steps without graphs: for all decodes, prompts, chunks and padding."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from attention_builders import Sequences, Shape
from execute_builders import needs_triton
from graph_builders import FakeCapturer, RecordingCapturer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strict_interpreter import strict_interpreter

from at_hand import on_cpu
from hypothesis_profiles import examples
from shoal.execute.attention.torch_backends import ReferenceAttention
from shoal.execute.attention.transformers_hook import AttentionStep
from shoal.execute.cuda_graphs import GraphCapturer

if TYPE_CHECKING:
    from shoal.execute.gpu.batch import SlotState, StepNumbers, StepShape
    from shoal.execute.gpu.graphs import GraphBuffers

pytestmark = [needs_triton, on_cpu]
CPU = torch.device("cpu")
FIRST_ID = 1000
"""Token ids of a sequence begin at a multiple of it."""

Row = tuple[int, int, int]
"""A sequence, and the begin and end of the tokens that are computed."""


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with strict_interpreter():
        yield


class Model:
    """One layer of attention and nothing else; id 1000 (i + 1) + n is that of the i-th sequence's token n."""

    def __init__(self, sequences: Sequences) -> None:
        self.seen: list[torch.Tensor] = []
        """Token ids of all calls."""
        self._spec = sequences.shape.spec
        self._values = [
            torch.cat([each.new_full((FIRST_ID, *each.shape[1:]), 7.0), *map(self._in_thousands, tensors)])
            for tensors in (sequences.queries, sequences.keys, sequences.values)
            for each in tensors[:1]
        ]

    def _in_thousands(self, tensor: torch.Tensor) -> torch.Tensor:
        room = tensor.new_full((FIRST_ID - len(tensor), *tensor.shape[1:]), torch.nan)
        return torch.cat([tensor, room])

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        assert input_ids.shape == positions.shape
        self.seen.append(input_ids[0])
        query, key, value = (each[input_ids[0]] for each in self._values)
        return step.attend(0, query, key, value, self._spec).flatten(1)[rows]


class Recorded:
    """Sequences of which the first ``stored`` tokens are in the pool, and graphs of their steps."""

    def __init__(
        self,
        lengths: Sequence[int],
        shape: Shape,
        capturer: GraphCapturer,
        state: "SlotState",
        buffers: "GraphBuffers",
    ) -> None:
        from shoal.execute.gpu.graphs import StepGraphs

        self.sequences = Sequences(shape, lengths)
        self.model = Model(self.sequences)
        self.state = state
        self.graphs = StepGraphs(self.model, self.sequences.cache, state, buffers, capturer)
        self._empty = self.sequences.cache.rows.clone()

    def store(self, rows: Sequence[Row]) -> None:
        """Have in the pool only what comes before ``rows``."""
        self.sequences.cache.rows.copy_(self._empty)
        firsts = {sequence: first for sequence, first, _ in rows}
        self.sequences.store([firsts.get(sequence, 0) for sequence in range(len(self.sequences.lengths))])

    def numbers(self, rows: Sequence[Row], sampled: Sequence[int], unknown: bool = False) -> "StepNumbers":
        """Decodes come first; slots are 3, 2, ... unknown: ids of decodes are known on the device only."""
        from shoal.execute.gpu.batch import StepNumbers, table_words

        slots = [3 - sequence for sequence, _, _ in rows]
        tables = [(3 - sequence, 0, self.sequences.tables[sequence]) for sequence, _, _ in rows]
        self.state.put_tables(torch.from_numpy(table_words(tables, self.state.tables.shape[1])))
        counts = [end - first for _, first, end in rows]
        decodes = counts.count(1)
        ids = [FIRST_ID * (sequence + 1) + n for sequence, first, end in rows for n in range(first, end)]
        if unknown:
            self.state.next_ids[slots[:decodes]] = torch.tensor(ids[:decodes])
            ids[:decodes] = [-1] * decodes
        starts = np.cumsum([0, *counts])
        prompts = [(slots[at], starts[at], counts[at], rows[at][1]) for at in range(decodes, len(rows))]
        last = starts[1:] - 1
        return StepNumbers(
            ids=np.array(ids),
            positions=np.concatenate([np.arange(first, end) for _, first, end in rows]),
            slots=np.repeat(slots, counts),
            decodes=decodes,
            prompts=np.array(prompts, dtype=np.int64).reshape(-1, 4),
            last=last,
            sampled=last[list(sampled) or [0]],
        )

    def run(self, numbers: "StepNumbers", shape: "StepShape") -> torch.Tensor:
        logits = self.graphs.run(torch.from_numpy(numbers.words(shape)), shape)
        assert logits is not None
        return logits

    def check(self, rows: Sequence[Row], sampled: Sequence[int], unknown: bool = False) -> torch.Tensor:
        """Replay a step, and compare logits and pool; returns all logits."""
        from shoal.execute.gpu.graphs import graph_shape

        pool = self.sequences.cache.rows
        numbers = self.numbers(rows, sampled, unknown)
        shape = graph_shape(numbers.shape)
        assert shape is not None
        self.store(rows)
        logits = self.run(numbers, shape).clone()
        stored = pool.clone()
        self.store(rows)
        step = ReferenceAttention(self.sequences.step(rows), self.sequences.cache)
        expected = self.sequences.attend(step, rows).flatten(1)[numbers.sampled]
        torch.testing.assert_close(logits[: len(expected)], expected)
        torch.testing.assert_close(stored, pool, rtol=0, atol=0, equal_nan=True)
        return logits


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


def decodes_of(lengths: Sequence[int], count: int) -> list[Row]:
    """A decode of the last token of each of the first sequences."""
    return [(row, length - 1, length) for row, length in enumerate(lengths[:count])]


@pytest.mark.parametrize("unknown", [False, True])
def test_padding_rows_attend_nothing_and_write_nothing(
    state: "SlotState", buffers: "GraphBuffers", unknown: bool
) -> None:
    """Token ids may be known on the device only."""
    lengths = [9, 5, 2]
    recorded = Recorded(lengths, Shape(), FakeCapturer(), state, buffers)
    numbers = recorded.numbers(decodes_of(lengths, 3), [0, 2], unknown)
    shape = type(numbers.shape).of_decodes(4)
    recorded.store(decodes_of(lengths, 3))
    assert recorded.run(numbers, shape).shape[0] == 4
    recorded.check(decodes_of(lengths, 3), [0, 1, 2], unknown)
    assert all(seen.tolist() == [1008, 2004, 3001, 0] for seen in recorded.model.seen)


LENGTHS = (24, 13, 8, 5)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Row], list[int], bool]:
    """Rows of a step, those that are sampled, and whether ids of decodes are unknown to the host."""
    rows = []
    for sequence in draw(st.sets(st.integers(0, len(LENGTHS) - 1), min_size=1)):
        first = draw(st.integers(0, LENGTHS[sequence] - 1))
        end = draw(st.one_of(st.just(first + 1), st.integers(first + 1, LENGTHS[sequence])))
        rows.append((sequence, first, end))
    rows.sort(key=lambda row: row[2] - row[1] > 1)
    sampled = draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    return rows, sampled, draw(st.booleans())


SMALL: tuple[list[Row], list[int], bool] = ([(3, 1, 3)], [], False)
LARGE: tuple[list[Row], list[int], bool] = ([(0, 20, 21), (1, 2, 13), (2, 0, 3), (3, 0, 3)], [3, 0, 2], True)


@settings(max_examples=examples(5), deadline=None)
@example(plans=[SMALL, LARGE, SMALL], window=None, wide=False)
@given(
    plans=st.lists(steps(), min_size=2, max_size=4),
    window=st.sampled_from([None, 7]),
    wide=st.booleans(),
)
def test_replayed_steps_compute_what_their_batch_says(
    plans: list[tuple[list[Row], list[int], bool]], window: int | None, wide: bool
) -> None:
    """A graph that was captured for one batch serves all of its shape; there are few shapes.

    wide: with more tokens in a tile than in a step.
    """
    from shoal.execute.gpu import graphs, step
    from shoal.execute.gpu.batch import SlotState

    with pytest.MonkeyPatch.context() as patch:
        shapes = (graphs.prompt_shape(20, 5), graphs.prompt_shape(52, 8))
        patch.setattr(graphs, "PROMPT_SHAPES", shapes)
        patch.setattr(graphs, "DECODE_SHAPES", graphs.DECODE_SHAPES[2:3])
        if not wide:
            patch.setattr(step, "tile_tokens", lambda heads, kv: 3)
        state, capturer = SlotState(CPU), RecordingCapturer()
        state.grow(4, 20)
        recorded = Recorded(LENGTHS, Shape(window=window), capturer, state, graphs.GraphBuffers(CPU))
        for rows, sampled, unknown in plans:
            recorded.check(rows, sampled, unknown)
        assert capturer.replayed == len(plans)
        assert capturer.tried == len(recorded.graphs.shapes) <= 3


def test_padding_of_decodes_gives_zeros(state: "SlotState", buffers: "GraphBuffers") -> None:
    recorded = Recorded([9, 5, 2], Shape(), RecordingCapturer(), state, buffers)
    numbers = recorded.numbers(decodes_of([9, 5, 2], 3), [0, 1, 2])
    recorded.store(decodes_of([9, 5, 2], 3))
    shape = type(numbers.shape).of_decodes(4)
    words = numbers.words(shape)
    words[shape.parts[4]] = 3  # the fourth token is none
    logits = recorded.graphs.run(torch.from_numpy(words), shape)
    assert logits is not None
    assert not logits.any()


def test_the_shape_is_the_smallest_that_fits() -> None:
    from shoal.execute.gpu.batch import StepShape
    from shoal.execute.gpu.graphs import DECODE_SHAPES, PROMPT_SHAPES, graph_shape

    sizes = sorted({shape.tokens for shape in PROMPT_SHAPES})
    for tokens in (2, *sizes, *(size + 1 for size in sizes)):
        for rows in (0, 1, 64, 65, 256, 257):
            step = StepShape(tokens, min(rows, tokens - 2), max(1, min(rows, tokens)), 1)
            fitting = [shape for shape in PROMPT_SHAPES if step.fits(shape)]
            best = min(fitting, key=lambda shape: (shape.tokens, shape.sampled), default=None)
            assert graph_shape(step) == best
    for rows in (1, 2, 3, 200, 256):
        found = graph_shape(StepShape.of_decodes(rows))
        assert found == next(shape for shape in DECODE_SHAPES if shape.tokens >= rows)
    for step in (StepShape.of_decodes(257), StepShape(513, 0, 1, 1), StepShape(500, 0, 1, 17)):
        assert graph_shape(step) is None


@pytest.mark.parametrize(
    ("rows", "tokens", "largest", "count"),
    [
        (1, 2048, (512, 64), 11),
        (64, 2048, (512, 64), 20),
        (65, 2048, (512, 256), 24),
        (300, 100, (256, 256), 17),
    ],
)
def test_needed_shapes_are_those_that_steps_may_take(
    rows: int, tokens: int, largest: tuple[int, int], count: int
) -> None:
    from shoal.execute.gpu.batch import StepShape
    from shoal.execute.gpu.graphs import graph_shape, needed_shapes

    of_prompts, of_decodes = needed_shapes(rows, tokens)
    assert (of_prompts[0].tokens, of_prompts[0].sampled) == largest
    assert len(of_prompts) + len(of_decodes) == count
    few = {graph_shape(StepShape.of_decodes(number)) for number in range(1, min(rows, tokens, 256) + 1)}
    assert set(of_decodes) == few
    for number in range(2, min(tokens, 512) + 1):
        for some in {1, min(rows, number), min(64, rows, number)}:
            assert graph_shape(StepShape(number, some - 1, some, 1)) in of_prompts


@pytest.mark.parametrize(
    "error", [RuntimeError("it looks at a number"), torch.OutOfMemoryError("it is large")]
)
def test_a_shape_whose_capture_failed_is_not_tried_again(
    error: Exception, state: "SlotState", buffers: "GraphBuffers"
) -> None:
    capturer = FakeCapturer(error)
    recorded = Recorded([9, 5, 2], Shape(), capturer, state, buffers)
    three, two = (recorded.numbers(decodes_of([9, 5, 2], count), []) for count in (3, 2))
    large, small = (type(three.shape).of_decodes(size) for size in (4, 2))
    assert recorded.graphs.takes(large)
    assert recorded.graphs.run(torch.from_numpy(three.words(large)), large) is None
    assert not recorded.graphs.takes(large)
    assert recorded.graphs.run(torch.from_numpy(two.words(small)), small) is not None
    assert (recorded.graphs.shapes, capturer.tried) == ([small], 2)


def test_models_share_the_buffers_of_graphs(state: "SlotState", buffers: "GraphBuffers") -> None:
    """The second model has fewer heads, so fewer logits."""
    capturer = RecordingCapturer()
    large = Recorded([60, 50, 40, 30], Shape(), capturer, state, buffers)
    small = Recorded([3, 2, 1], Shape(heads=2, kv_heads=1), capturer, state, buffers)
    for counts in ((4, 3), (1, 1), (2, 2), (4, 3)):
        for count, recorded in zip(counts, (large, small), strict=True):
            recorded.check(decodes_of(recorded.sequences.lengths, count), range(count))
    rows = [decodes_of(each.sequences.lengths, 2) for each in (large, small)]
    numbers = [each.numbers(some, []) for each, some in zip((large, small), rows, strict=True)]
    shape = type(numbers[0].shape).of_decodes(2)
    outputs = [each.run(some, shape) for each, some in zip((large, small), numbers, strict=True)]
    assert outputs[0].data_ptr() == outputs[1].data_ptr()


@pytest.fixture
def _few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.execute.gpu import graphs

    shapes = tuple(graphs.prompt_shape(*size) for size in ((4, 4), (8, 4), (16, 4)))
    monkeypatch.setattr(graphs, "PROMPT_SHAPES", shapes)


@pytest.mark.usefixtures("_few_shapes")
def test_all_shapes_are_recorded_ahead_the_largest_first(state: "SlotState", buffers: "GraphBuffers") -> None:
    capturer = RecordingCapturer()
    recorded = Recorded([9, 5, 2], Shape(), capturer, state, buffers)
    pool = recorded.sequences.cache.rows
    before = pool.clone()
    recorded.graphs.record(7, 10)
    tokens = [(shape.tokens, shape.prompts) for shape in recorded.graphs.shapes]
    assert tokens == [(16, 8), (8, 4), (4, 2), (8, 0), (4, 0), (2, 0), (1, 0)]
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)
    recorded.check(decodes_of([9, 5, 2], 3), [0, 1, 2])
    recorded.check([(1, 4, 5), (0, 3, 9), (2, 0, 2)], [0, 2])
    assert capturer.tried == len(tokens)


@pytest.mark.usefixtures("_few_shapes")
def test_recording_ahead_ends_where_memory_does(state: "SlotState", buffers: "GraphBuffers") -> None:
    """For each kind of steps by itself, as a model may not allow one of them."""
    from shoal.execute.gpu.graphs import needed_shapes

    capturer = FakeCapturer(*(torch.OutOfMemoryError("it is large") for _ in range(2)))
    recorded = Recorded([9, 5, 2], Shape(), capturer, state, buffers)
    recorded.graphs.record(100_000, 100_000)
    assert (recorded.graphs.shapes, capturer.tried) == ([], 2)
    for shapes in needed_shapes(100_000, 100_000):
        assert [recorded.graphs.takes(shape) for shape in shapes[:2]] == [False, True]
