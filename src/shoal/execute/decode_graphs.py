"""CUDA graphs of decode steps: hundreds of small kernels are started as one.

A step in which all rows decode does the same whatever its rows are: only numbers in buffers differ. So it is
recorded once for each of some numbers of rows, when it is first needed, and replayed; rows that are missing
have length 0: they attend nothing and write nothing.
"""

import logging
from bisect import bisect_left
from functools import partial
from typing import Any

import numpy as np
import torch

from shoal.execute.batch import StepBatch
from shoal.execute.cuda_graphs import Recorded, Recorder
from shoal.execute.interface import Forward
from shoal.execute.packed_qkv import PackedQKV
from shoal.execute.service_cache import MergedCache
from shoal.execute.triton_kernels import attend_decodes, store_decodes

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows for which steps are recorded; larger ones run without."""

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """The recorded decode steps of one service; they hold until its view of the pool is another.

    context_tokens: of the longest sequence that the model can have.
    """

    def __init__(self, forward: Forward, cache: MergedCache, context_tokens: int, recorder: Recorder) -> None:
        self.cache = cache
        """The view of the pool that they read and write."""
        self._forward = forward
        self._buffers = _Buffers(cache.device, -(-context_tokens // cache.block_size))
        self._recorder = recorder
        self._graphs: dict[int, Recorded] = {}
        self._impossible: set[int] = set()

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that were recorded."""
        return sorted(self._graphs)

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits [rows, vocab] of a step of decodes, in its order, until the next is run.

        None: the step has to be run without.
        """
        rows = len(batch.firsts)
        if rows > SIZES[-1]:
            return None
        size = SIZES[bisect_left(SIZES, rows)]
        if size in self._impossible:
            return None
        self._buffers.put(batch, size)
        graph = self._graphs.get(size) or self._record(size)
        if graph is None:
            return None
        graph.replay()
        return graph.output[:rows]

    def _record(self, size: int) -> Recorded | None:
        """Record the step that is in the buffers; tried once for each number of rows."""
        try:
            self._graphs[size] = self._recorder.record(partial(self._compute, size))
        except Exception as error:
            # Memory is short, or the model looks at numbers on the device to decide what to do.
            self._impossible.add(size)
            _log.warning("decodes of %d rows run without a CUDA graph: %s", size, error)
            return None
        return self._graphs[size]

    def _compute(self, size: int) -> torch.Tensor:
        """Logits of the first ``size`` rows of the buffers, which stay until the next are computed."""
        buffers = self._buffers
        step = _RecordedStep(self.cache, buffers.tables[:size], buffers.lengths[:size])
        logits = self._forward(buffers.ids[:, :size], buffers.positions[:, :size], buffers.rows[:size], step)
        return buffers.logits(logits)[:size].copy_(logits)


class _Buffers:
    """What recorded steps read and write, for the largest number of rows; smaller ones use its first rows."""

    def __init__(self, device: torch.device, width: int) -> None:
        most = SIZES[-1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids, self.positions = zeros(1, most), zeros(1, most)
        self.lengths, self.tables = zeros(most, dtype=torch.int32), zeros(most, width, 1, dtype=torch.int32)
        self.rows = torch.arange(most, device=device)
        self._logits: torch.Tensor | None = None

    def logits(self, like: torch.Tensor) -> torch.Tensor:
        """[most, vocab], of the vocabulary and dtype of ``like``; made when first asked for."""
        if self._logits is None:
            self._logits = like.new_empty((SIZES[-1], like.shape[1]))
        return self._logits

    def put(self, batch: StepBatch, size: int) -> None:
        """Take over the rows of a step; those behind them, up to ``size``, have no tokens."""
        rows = len(batch.firsts)
        lengths = np.zeros(size, dtype=np.int32)
        lengths[:rows] = batch.ends
        self.lengths[:size] = torch.from_numpy(lengths)
        self.ids[:, :rows] = batch.input_ids
        self.positions[:, :rows] = batch.positions
        self.tables[:rows, : batch.tables.shape[1], 0] = torch.from_numpy(batch.tables.astype(np.int32))


class _RecordedStep(PackedQKV):
    """A step of decodes over buffers that stay where they are."""

    def __init__(self, cache: MergedCache, tables: torch.Tensor, lengths: torch.Tensor) -> None:
        self._cache = cache
        self._tables, self._lengths = tables, lengths

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """See AttentionStep."""
        del extra
        kv = self._cache.layer(layer)
        store_decodes(key, value, kv, self._tables, self._lengths)
        return attend_decodes(query, kv, self._tables, self._lengths, scaling, window, softcap)
