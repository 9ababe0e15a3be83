"""Replayed decode graphs give the logits of steps without graphs, for all numbers of rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from attention_builders import Sequences, Shape
from execute_builders import needs_triton
from graph_builders import FakeCapturer
from strict_interpreter import strict_interpreter

from at_hand import on_cpu
from shoal.execute.attention.kv_views import MergedCache
from shoal.execute.attention.torch_backends import ReferenceAttention
from shoal.execute.attention.transformers_hook import AttentionStep
from shoal.execute.batch import StepBatch

if TYPE_CHECKING:
    from shoal.execute.decode_graphs import DecodeGraphs, GraphBuffers

pytestmark = [needs_triton, on_cpu]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("shoal.execute.attention.triton_kernels.num_context_parts", lambda rows, kv_heads: 1)
    with strict_interpreter():
        yield


class Model:
    """One layer of attention and nothing else; rows that are missing have keys and values, too."""

    def __init__(self, sequences: Sequences, vocab: int = 50, context: int = 100) -> None:
        self.vocab, self.context = vocab, context
        self.seen: list[torch.Tensor] = []
        """What each call has given."""
        self._sequences = sequences

    def step(self, count: int) -> StepBatch:
        """The last tokens of the first sequences, which the next calls compute."""
        rows = [(row, length - 1, length) for row, length in enumerate(self._sequences.lengths[:count])]
        all_tokens = (self._sequences.queries, self._sequences.keys, self._sequences.values)
        self._tensors = [self._sequences.of_step(each, rows) for each in all_tokens]
        batch = self._sequences.step(rows)
        batch.input_ids[:] = self.vocab - 1
        return batch

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        assert len(rows) == input_ids.shape[1] == positions.shape[1]
        assert int(input_ids.max()) < self.vocab
        assert int(positions.max()) < self.context
        query, key, value = (self._padded(each, len(rows)) for each in self._tensors)
        out = step.attend(0, query, key, value, **self._sequences.shape.settings, extra={}).flatten(1)
        self.seen.append(out)
        return out

    def _padded(self, known: torch.Tensor, rows: int) -> torch.Tensor:
        others = torch.full((rows - len(known), *known.shape[1:]), 7.0, dtype=known.dtype)
        return torch.cat([known, others])


def graphs_of(
    model: Model, sequences: Sequences, capturer: FakeCapturer, buffers: "GraphBuffers | None" = None
) -> "DecodeGraphs":
    from shoal.execute.decode_graphs import DecodeGraphs, GraphBuffers

    buffers = buffers or GraphBuffers(torch.device("cpu"))
    assert isinstance(sequences.cache, MergedCache)
    return DecodeGraphs(model, sequences.cache, model.context, buffers, capturer)


def sequences_of(lengths: list[int], shape: Shape) -> Sequences:
    """Sequences of which all but the last token are in the pool."""
    sequences = Sequences(shape, lengths)
    sequences.store([length - 1 for length in lengths])
    return sequences


@pytest.fixture
def sequences() -> Sequences:
    return sequences_of([9, 5, 2], Shape())


def test_padding_rows_attend_nothing_and_write_nothing(sequences: Sequences) -> None:
    model = Model(sequences)
    batch = model.step(3)
    pool = sequences.cache.rows
    before = pool.clone()
    logits = graphs_of(model, sequences, FakeCapturer()).run(batch)
    stored = pool.clone()
    pool.copy_(before)
    reference = ReferenceAttention(batch, sequences.cache)
    torch.testing.assert_close(logits, model(batch.input_ids, batch.positions, torch.arange(3), reference))
    torch.testing.assert_close(stored, pool, rtol=0, atol=0, equal_nan=True)
    assert [len(out) for out in model.seen] == [4, 4, 3]
    assert not model.seen[0][3].any()


@pytest.mark.parametrize(
    "error", [RuntimeError("it looks at a number"), torch.OutOfMemoryError("it is large")]
)
def test_a_size_whose_capture_failed_is_not_tried_again(sequences: Sequences, error: Exception) -> None:
    model, capturer = Model(sequences), FakeCapturer(error)
    graphs = graphs_of(model, sequences, capturer)
    assert graphs.run(model.step(3)) is None
    assert graphs.run(model.step(2)) is not None
    assert graphs.run(model.step(3)) is None
    assert (graphs.sizes, capturer.tried) == ([2], 2)


def test_services_share_the_buffers_of_graphs() -> None:
    """The second model has fewer heads, a smaller vocabulary and a shorter context."""
    from shoal.execute.decode_graphs import GraphBuffers

    buffers, capturer = GraphBuffers(torch.device("cpu")), FakeCapturer()
    large, small = (
        sequences_of([60, 50, 40, 30], Shape()),
        sequences_of([3, 2, 1], Shape(heads=2, kv_heads=1)),
    )
    models = [(Model(large, vocab=90, context=100), large), (Model(small, vocab=5, context=4), small)]
    graphs = [graphs_of(model, sequences, capturer, buffers) for model, sequences in models]
    for counts in ((4, 3), (1, 1), (2, 2), (4, 3)):
        for count, (model, sequences), recorded in zip(counts, models, graphs, strict=True):
            batch = model.step(count)
            reference = ReferenceAttention(batch, sequences.cache)
            expected = model(batch.input_ids, batch.positions, torch.arange(count), reference)
            torch.testing.assert_close(recorded.run(batch), expected)
    outputs = [recorded.run(model.step(2)) for (model, _), recorded in zip(models, graphs, strict=True)]
    assert outputs[0] is not None
    assert outputs[1] is not None
    assert outputs[0].data_ptr() == outputs[1].data_ptr()
