"""CUDA graphs of decode steps: hundreds of small kernels are started as one.

A step in which all rows decode does the same whatever its rows are: only numbers in buffers differ. So it is
recorded once for each of some numbers of rows, when it is first needed, and replayed; rows that are missing
repeat the first one, which writes the same keys and values to the same place again.
"""

import logging
from bisect import bisect_left
from typing import Any

import numpy as np
import torch

from shoal.execute.batch import StepBatch
from shoal.execute.interface import Forward
from shoal.execute.packed_qkv import PackedQKV
from shoal.execute.service_cache import ServiceCache
from shoal.execute.triton_kernels import attend_decodes

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows for which steps are recorded; larger ones run without."""

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """The recorded decode steps of one service; they hold until its view of the pool is another.

    context_tokens: of the longest sequence there may be.
    """

    def __init__(self, forward: Forward, cache: ServiceCache, context_tokens: int) -> None:
        self.cache = cache
        """The view of the pool that they read and write."""
        self._forward = forward
        self._width = -(-context_tokens // cache.block_size)
        self._recorded: dict[int, _Recorded] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._possible = True

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits [rows, vocab] of a step of decodes, in its order, until the next is run.

        None: the step has to be run without.
        """
        rows = len(batch.firsts)
        if not self._possible or rows > SIZES[-1]:
            return None
        size = SIZES[bisect_left(SIZES, rows)]
        recorded = self._recorded.get(size)
        if recorded is None:
            recorded = _Recorded(size, self._width, self.cache)
            recorded.put(batch)
            try:
                recorded.record(self._forward, self._memory)
            except Exception as error:
                # Such as models that look at numbers on the device to decide what to do.
                torch.cuda.synchronize()
                self._possible = False
                _log.warning("decodes run without CUDA graphs, which this model does not allow: %s", error)
                return None
            self._recorded[size] = recorded
        else:
            recorded.put(batch)
        return recorded.replay()[:rows]


class _Recorded(PackedQKV):
    """A step of ``size`` decodes over buffers that stay where they are."""

    def __init__(self, size: int, width: int, cache: ServiceCache) -> None:
        entries = cache.entries(np.zeros((size, width), dtype=np.int64))
        device = cache.device
        self.cache = cache
        self._size = size
        self._ids = torch.zeros((1, size), dtype=torch.int64, device=device)
        self._positions = torch.zeros((1, size), dtype=torch.int64, device=device)
        self._lengths = torch.ones(size, dtype=torch.int32, device=device)
        self._tables = torch.zeros(entries.shape, dtype=torch.int32, device=device)
        self._index = torch.zeros_like(cache.index(np.zeros(size, dtype=np.int64)))
        self._offsets = torch.zeros(size, dtype=torch.int64, device=device)
        self._rows = torch.arange(size, device=device)
        self._graph = torch.cuda.CUDAGraph()
        self._logits: torch.Tensor | None = None

    def put(self, batch: StepBatch) -> None:
        """Take over the rows of a step."""
        cache, rows = self.cache, len(batch.firsts)
        chosen = np.zeros(self._size, dtype=np.int64)
        chosen[:rows] = np.arange(rows)
        at, tables = batch.firsts[chosen], batch.tables[chosen]
        entries = cache.entries(tables).astype(np.int32)
        self._ids[:, :rows] = batch.input_ids
        self._ids[:, rows:] = batch.input_ids[:, :1]
        self._positions.copy_(torch.from_numpy(at))
        self._lengths.copy_(torch.from_numpy(at.astype(np.int32) + 1))
        self._tables[:, : entries.shape[1]].copy_(torch.from_numpy(entries))
        self._index.copy_(cache.index(tables[np.arange(self._size), at // cache.block_size]))
        self._offsets.copy_(torch.from_numpy(at % cache.block_size))

    def record(self, forward: Forward, memory: Any) -> None:
        """Run the step once as any other, so that kernels are compiled, then write down what it does."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward(self._ids, self._positions, self._rows, self)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._logits = forward(self._ids, self._positions, self._rows, self)

    def replay(self) -> torch.Tensor:
        """Logits [size, vocab]."""
        assert self._logits is not None
        self._graph.replay()
        return self._logits

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
        self.cache.write(layer, self._index, self._offsets, key, value)
        kv = self.cache.layer(layer)
        return attend_decodes(query, kv, self._tables, self._lengths, scaling, window, softcap)
