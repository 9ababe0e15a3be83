"""Recorded decodes give what decodes give that are not recorded, whatever the number of rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from attention_builders import Sequences, Shape
from execute_builders import needs_triton
from graph_builders import FakeRecorder
from strict_interpreter import strict_interpreter

from at_hand import on_cpu
from shoal.execute.interface import AttentionStep
from shoal.execute.paged import ReferenceStep
from shoal.execute.service_cache import MergedCache

if TYPE_CHECKING:
    from shoal.execute.decode_graphs import DecodeGraphs

pytestmark = [needs_triton, on_cpu]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("shoal.execute.triton_kernels.parts_of", lambda rows, kv_heads: 1)
    with strict_interpreter():
        yield


class Model:
    """Layers of attention without anything else; rows that do not decode have keys and values, too."""

    def __init__(self, sequences: Sequences, firsts: list[int]) -> None:
        self.vocab, self.context = 50, 100
        self.seen: list[torch.Tensor] = []
        """What each call has given."""
        rows = [(row, first, first + 1) for row, first in enumerate(firsts)]
        self.batch = sequences.step(rows)
        self._tensors = [
            sequences.of_step(each, rows) for each in (sequences.queries, sequences.keys, sequences.values)
        ]
        self._settings = sequences.shape.settings

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        assert len(rows) == input_ids.shape[1] == positions.shape[1]
        assert int(input_ids.max()) < self.vocab
        assert int(positions.max()) < self.context
        query, key, value = (self._padded(each, len(rows)) for each in self._tensors)
        out = step.attend(0, query, key, value, **self._settings, extra={}).flatten(1)
        self.seen.append(out)
        return out

    def _padded(self, known: torch.Tensor, rows: int) -> torch.Tensor:
        others = torch.full((rows - len(known), *known.shape[1:]), 7.0, dtype=known.dtype)
        return torch.cat([known, others])


def graphs_of(model: Model, sequences: Sequences, recorder: FakeRecorder) -> "DecodeGraphs":
    from shoal.execute.decode_graphs import DecodeGraphs

    assert isinstance(sequences.cache, MergedCache)
    return DecodeGraphs(model, sequences.cache, model.context, recorder)


def sequences_of(lengths: list[int]) -> Sequences:
    """Sequences of which all but the last token are in the pool."""
    sequences = Sequences(Shape(), lengths)
    sequences.store([length - 1 for length in lengths])
    return sequences


def test_rows_that_are_missing_attend_nothing_and_write_nothing() -> None:
    lengths = [9, 5, 2]
    sequences = sequences_of(lengths)
    model = Model(sequences, [length - 1 for length in lengths])
    before = sequences.cache.rows.clone()
    logits = graphs_of(model, sequences, FakeRecorder()).run(model.batch)
    stored = sequences.cache.rows.clone()
    sequences.cache.rows.copy_(before)
    expected = model(
        model.batch.input_ids,
        model.batch.positions,
        torch.arange(3),
        ReferenceStep(model.batch, sequences.cache),
    )
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(stored, sequences.cache.rows, rtol=0, atol=0, equal_nan=True)
    assert [len(out) for out in model.seen] == [4, 4, 3]
    assert not model.seen[0][3].any()
