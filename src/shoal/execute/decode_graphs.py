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

from shoal.execute.attention.kv_views import MergedCache
from shoal.execute.attention.packed_qkv import PackedQKV
from shoal.execute.attention.triton_kernels import attend_decodes, store_decodes
from shoal.execute.batch import StepBatch
from shoal.execute.cuda_graphs import Recorded, Recorder
from shoal.execute.kv_pool_size import MOST_RECORDED_ROWS
from shoal.execute.model.transformers_forward import Forward

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MOST_RECORDED_ROWS)
"""Numbers of rows for which steps are recorded; larger ones run without."""

_log = logging.getLogger(__name__)


class DecodeBuffers:
    """What recorded steps read and write, for the largest number of rows; smaller ones use its first rows.

    All services of a device have the same, since no two of their steps run side by side.
    """

    def __init__(self, device: torch.device) -> None:
        most = SIZES[-1]
        self.ids, self.positions = torch.zeros((2, 1, most), dtype=torch.int64, device=device)
        self.lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self.rows = torch.arange(most, device=device)
        self._tables = torch.empty(0, dtype=torch.int32, device=device)
        self._logits = torch.empty(0, dtype=torch.uint8, device=device)

    def tables(self, width: int) -> torch.Tensor:
        """Room for tables of so many blocks, int32 [most, width, 1]."""
        if len(self._tables) < (size := SIZES[-1] * width):  # who has the smaller one keeps it
            self._tables = self._tables.new_empty(size)
        return self._tables[:size].view(SIZES[-1], width, 1)

    def logits(self, like: torch.Tensor) -> torch.Tensor:
        """Room for logits of the vocabulary and dtype of ``like``, [most, vocab]."""
        if len(self._logits) < (size := SIZES[-1] * like.shape[1] * like.element_size()):
            self._logits = self._logits.new_empty(size)
        return self._logits[:size].view(like.dtype).view(SIZES[-1], -1)

    def put(self, batch: StepBatch, size: int) -> None:
        """Take over the rows of a step; those behind them, up to ``size``, have no tokens."""
        rows = len(batch.firsts)
        lengths = np.zeros(size, dtype=np.int32)
        lengths[:rows] = batch.ends
        self.lengths[:size] = torch.from_numpy(lengths)
        for buffer, content in ((self.ids, batch.input_ids), (self.positions, batch.positions)):
            buffer[:, :rows] = content
            buffer[:, rows:size] = 0  # of another model they may be beyond this one's


class DecodeGraphs:
    """The recorded decode steps of one service; they hold until its view of the pool is another.

    context_tokens: of the longest sequence that the model can have.
    """

    def __init__(
        self,
        forward: Forward,
        cache: MergedCache,
        context_tokens: int,
        buffers: DecodeBuffers,
        recorder: Recorder,
    ) -> None:
        self.cache = cache
        """The view of the pool that they read and write."""
        self._forward = forward
        self._buffers = buffers
        self._tables = buffers.tables(-(-context_tokens // cache.block_size))
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
        tables = torch.from_numpy(batch.tables.astype(np.int32))
        self._tables[:rows, : tables.shape[1], 0] = tables
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
        step = _RecordedStep(self.cache, self._tables[:size], buffers.lengths[:size])
        logits = self._forward(buffers.ids[:, :size], buffers.positions[:, :size], buffers.rows[:size], step)
        return buffers.logits(logits)[:size].copy_(logits)


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
