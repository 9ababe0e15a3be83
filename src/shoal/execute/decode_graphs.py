"""CUDA graphs of decode steps: hundreds of small kernels are launched as one.

Steps in which all rows decode run the same kernels and differ only in buffer contents. So a step is captured
once for each size in ``GRAPH_SIZES`` when that size is first needed, and replayed. Padding rows have length
0: they attend nothing and write nothing.
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
from shoal.execute.cuda_graphs import CapturedGraph, GraphCapturer
from shoal.execute.kv_pool_size import MAX_GRAPH_ROWS
from shoal.execute.model.transformers_forward import Forward

GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MAX_GRAPH_ROWS)
"""Numbers of rows for which steps are captured; larger steps run without graphs."""

_log = logging.getLogger(__name__)


class GraphBuffers:
    """Buffers that captured steps read and write, for the largest size; smaller sizes use the first rows.

    All services of a device share them, since no two of their steps run concurrently.
    """

    def __init__(self, device: torch.device) -> None:
        most = GRAPH_SIZES[-1]
        self.ids, self.positions = torch.zeros((2, 1, most), dtype=torch.int64, device=device)
        self.lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self.rows = torch.arange(most, device=device)
        self._tables = torch.empty(0, dtype=torch.int32, device=device)
        self._logits = torch.empty(0, dtype=torch.uint8, device=device)

    def tables(self, width: int) -> torch.Tensor:
        """Block tables of ``width`` blocks, int32 [max rows, width, 1]."""
        if len(self._tables) < (size := GRAPH_SIZES[-1] * width):  # graphs on the smaller buffer keep it
            self._tables = self._tables.new_empty(size)
        return self._tables[:size].view(GRAPH_SIZES[-1], width, 1)

    def logits(self, like: torch.Tensor) -> torch.Tensor:
        """Buffer for logits of the vocabulary and dtype of ``like``, [max rows, vocab]."""
        if len(self._logits) < (size := GRAPH_SIZES[-1] * like.shape[1] * like.element_size()):
            self._logits = self._logits.new_empty(size)
        return self._logits[:size].view(like.dtype).view(GRAPH_SIZES[-1], -1)

    def load(self, batch: StepBatch, size: int) -> None:
        """Copy the rows of a step into the buffers; padding rows up to ``size`` have no tokens."""
        rows = len(batch.firsts)
        lengths = np.zeros(size, dtype=np.int32)
        lengths[:rows] = batch.ends
        self.lengths[:size] = torch.from_numpy(lengths)
        for buffer, content in ((self.ids, batch.input_ids), (self.positions, batch.positions)):
            buffer[:, :rows] = content
            buffer[:, rows:size] = 0  # ids of another model may be outside this vocabulary


class DecodeGraphs:
    """The captured decode steps of one service; they are valid for one view of the pool.

    context_tokens: length of the longest sequence of the model.
    """

    def __init__(
        self,
        forward: Forward,
        cache: MergedCache,
        context_tokens: int,
        buffers: GraphBuffers,
        capturer: GraphCapturer,
    ) -> None:
        self.cache = cache
        """View of the pool that the graphs read and write."""
        self._forward = forward
        self._buffers = buffers
        self._tables = buffers.tables(-(-context_tokens // cache.block_size))
        self._capturer = capturer
        self._graphs: dict[int, CapturedGraph] = {}
        self._failed_sizes: set[int] = set()

    @property
    def sizes(self) -> list[int]:
        return sorted(self._graphs)

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits [rows, vocab] of a decode step, in its order; valid until the next run.

        None if the step must run without a graph.
        """
        rows = len(batch.firsts)
        if rows > GRAPH_SIZES[-1]:
            return None
        size = GRAPH_SIZES[bisect_left(GRAPH_SIZES, rows)]
        if size in self._failed_sizes:
            return None
        self._buffers.load(batch, size)
        tables = torch.from_numpy(batch.tables.astype(np.int32))
        self._tables[:rows, : tables.shape[1], 0] = tables
        graph = self._graphs.get(size) or self._capture(size)
        if graph is None:
            return None
        graph.replay()
        return graph.output[:rows]

    def _capture(self, size: int) -> CapturedGraph | None:
        """Capture the step in the buffers; tried once for each size."""
        try:
            self._graphs[size] = self._capturer.capture(partial(self._compute, size))
        except Exception as error:
            # Out of memory, or the model's control flow depends on values on the device.
            self._failed_sizes.add(size)
            _log.warning("decodes of %d rows run without a CUDA graph: %s", size, error)
            return None
        return self._graphs[size]

    def _compute(self, size: int) -> torch.Tensor:
        """Logits of the first ``size`` rows of the buffers; valid until the next call."""
        buffers = self._buffers
        step = _GraphAttention(self.cache, self._tables[:size], buffers.lengths[:size])
        logits = self._forward(buffers.ids[:, :size], buffers.positions[:, :size], buffers.rows[:size], step)
        return buffers.logits(logits)[:size].copy_(logits)


class _GraphAttention(PackedQKV):
    """Attention of decodes over persistent buffers."""

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
        del extra
        kv = self._cache.layer(layer)
        store_decodes(key, value, kv, self._tables, self._lengths)
        return attend_decodes(query, kv, self._tables, self._lengths, scaling, window, softcap)
