"""CUDA graphs of decode steps: hundreds of small kernels are started as one.

A step in which all rows decode does the same whatever its rows are: only numbers in buffers differ. So it is
recorded once for each of some numbers of rows, when it is first needed, and replayed; rows that are missing
repeat the first one, which writes the same keys and values to the same place again.
"""

import logging
from bisect import bisect_left
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from shoal.execute.batch import StepBatch
from shoal.execute.interface import Forward
from shoal.execute.packed_qkv import PackedQKV
from shoal.execute.service_cache import MergedCache
from shoal.execute.triton_kernels import attend_decodes

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows for which steps are recorded; larger ones run without."""

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """The recorded decode steps of one service; they hold until its view of the pool is another.

    context_tokens: of the longest sequence that the model can have.
    """

    def __init__(self, forward: Forward, cache: MergedCache, context_tokens: int) -> None:
        self.cache = cache
        """The view of the pool that they read and write."""
        self._forward = forward
        self._buffers = _Buffers(cache, -(-context_tokens // cache.block_size))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._possible = True

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that were recorded."""
        return sorted(self._graphs)

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits [rows, vocab] of a step of decodes, in its order, until the next is run.

        None: the step has to be run without.
        """
        rows = len(batch.firsts)
        if not self._possible or rows > SIZES[-1]:
            return None
        size = SIZES[bisect_left(SIZES, rows)]
        self._buffers.put(batch, size)
        if size not in self._graphs and not self._record(size):
            return None
        self._graphs[size].replay()
        assert self._buffers.logits is not None
        return self._buffers.logits[:rows]

    def _record(self, size: int) -> bool:
        """Record the step that is in the buffers, if this model can be; raises where memory is short."""
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        step = _RecordedStep(self._buffers, size)
        try:
            step.warm_up(self._forward, stream)
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                step.compute(self._forward)
        except Exception as error:
            # A capture that fails leaves its stream current, and the allocator (before torch 2.12) in it.
            torch.cuda.set_stream(stream)
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(self.cache.device.index, self._memory)
            torch.cuda.synchronize()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # Such as of models that look at numbers on the device to decide what to do.
            self._possible = False
            self._graphs.clear()
            _log.warning("decodes run without CUDA graphs, which this model does not allow: %s", error)
            return False
        self._graphs[size] = graph
        return True


class _Buffers:
    """What recorded steps read and write, for the largest number of rows; smaller ones use its first rows."""

    def __init__(self, cache: MergedCache, width: int) -> None:
        self.cache = cache
        most = SIZES[-1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=cache.device)

        self.ids, self.positions = zeros(1, most), zeros(1, most)
        self.blocks, self.offsets = zeros(most), zeros(most)
        """Where the new keys and values go."""
        self.lengths, self.tables = zeros(most, dtype=torch.int32), zeros(most, width, 1, dtype=torch.int32)
        self.rows = torch.arange(most, device=cache.device)
        self.logits: torch.Tensor | None = None
        """[most, vocab], as soon as they are known to be of some dtype."""

    def put(self, batch: StepBatch, size: int) -> None:
        """Take over the rows of a step, and repeat the first up to ``size``."""
        rows, block_size = len(batch.firsts), self.cache.block_size
        chosen = np.zeros(size, dtype=np.int64)
        chosen[:rows] = np.arange(rows)
        at, tables = batch.firsts[chosen], batch.tables[chosen]
        self.ids[:, :rows] = batch.input_ids
        self.ids[:, rows:size] = batch.input_ids[:, :1]
        self.positions[0, :size] = torch.from_numpy(at)
        self.blocks[:size] = torch.from_numpy(tables[np.arange(size), at // block_size])
        self.offsets[:size] = torch.from_numpy(at % block_size)
        self.lengths[:size] = torch.from_numpy(at.astype(np.int32) + 1)
        self.tables[:size, : tables.shape[1], 0] = torch.from_numpy(tables.astype(np.int32))


class _RecordedStep(PackedQKV):
    """A step of ``size`` decodes over buffers that stay where they are."""

    def __init__(self, buffers: _Buffers, size: int) -> None:
        self._buffers = buffers
        self._size = size

    def warm_up(self, forward: Forward, stream: torch.cuda.Stream) -> None:
        """Run as any other step, so that kernels are compiled, and make room for logits."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            logits = self._logits(forward)
        stream.wait_stream(side)
        if self._buffers.logits is None:
            shape = (SIZES[-1], logits.shape[1])
            self._buffers.logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)

    def compute(self, forward: Forward) -> None:
        """Fill the logits of the buffers."""
        assert self._buffers.logits is not None
        self._buffers.logits[: self._size].copy_(self._logits(forward))

    def _logits(self, forward: Forward) -> torch.Tensor:
        size, buffers = self._size, self._buffers
        return forward(buffers.ids[:, :size], buffers.positions[:, :size], buffers.rows[:size], self)

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
        size, buffers = self._size, self._buffers
        buffers.cache.write(layer, buffers.blocks[:size], buffers.offsets[:size], key, value)
        kv = buffers.cache.layer(layer)
        tables, lengths = buffers.tables[:size], buffers.lengths[:size]
        return attend_decodes(query, kv, tables, lengths, scaling, window, softcap)
