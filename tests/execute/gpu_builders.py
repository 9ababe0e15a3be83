"""A GpuExecutor on the CPU: attention in torch, graphs that are called again, tokens that are late."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_builders import FakeCapturer, RecordingCapturer

from shoal.execute.attention.kv_views import ServiceCache
from shoal.execute.attention.packed_qkv import PackedQKV
from shoal.execute.attention.spec import AttentionSpec
from shoal.execute.attention.torch_backends import _textbook_attention
from shoal.execute.gpu import graphs, slot_steps, step
from shoal.execute.gpu.executor import GpuExecutor
from shoal.execute.gpu.step import StepInputs

PROMPT_SIZES = ((6, 4), (12, 4), (12, 8), (40, 8))
"""Tokens and rows of recorded steps with prompts, which are small: recording computes all of them."""


class TextbookStep(PackedQKV):
    """What a DeviceStep computes, row by row."""

    captures_decodes = True

    def __init__(self, inputs: StepInputs, cache: ServiceCache) -> None:
        self._inputs, self._cache = inputs, cache

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        inputs, kv, size = self._inputs, self._cache.layer(layer), self._cache.block_size
        rows, positions = inputs.table_rows.tolist(), inputs.positions.tolist()
        for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if row >= 0:
                entry = inputs.tables[row, position // size, 0]
                kv.keys[entry, position % size] = key[token]
                kv.values[entry, position % size] = value[token]
        out = query.new_zeros((*query.shape[:2], value.shape[-1]))
        spans = [(at, at + 1, rows[at], end) for at, end in enumerate(inputs.lengths.tolist())]
        for row, begin, tokens, first in inputs.prompts.tolist():
            spans.append((begin, begin + tokens, row, first + tokens))
        for begin, stop, row, end in spans:
            if row >= 0 and end > 0 and stop > begin:
                entries = inputs.tables[row, : -(-end // size), 0].long()
                keys, values = (each[entries].flatten(0, 1)[:end] for each in (kv.keys, kv.values))
                first = end - (stop - begin)
                out[begin:stop] = _textbook_attention(query[begin:stop], keys, values, first, spec)
        return out


class LateReading:
    """Tokens that may be read once they were waited for."""

    def __init__(self, tokens: torch.Tensor, on_wait: Callable[[], None]) -> None:
        self._tokens = tokens.clone()
        self._on_wait = on_wait

    def wait(self) -> list[int]:
        self._on_wait()
        found: list[int] = self._tokens.tolist()
        return found

    def duration_ns(self) -> int:
        return 1000


class LateQueue:
    """Counts the plans that were launched and not waited for."""

    def __init__(self) -> None:
        self.waiting = self.most_waiting = self.read_count = 0

    def begin(self) -> None:
        return None

    def read(self, numbers: torch.Tensor, begun: None) -> LateReading:
        assert not numbers.is_cuda
        self.waiting += 1
        self.read_count += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        return LateReading(numbers, self._waited)

    def _waited(self) -> None:
        self.waiting -= 1


class GpuOnCpu:
    """Engines that are built while it is entered have a GpuExecutor on the CPU.

    attention: TextbookStep, or None for interpreted kernels, whose launches can be recorded.
    """

    def __init__(self, patch: pytest.MonkeyPatch, attention: type | None = TextbookStep) -> None:
        self.queue = LateQueue()
        self.capturer = FakeCapturer() if attention else RecordingCapturer()
        self.executors: list[GpuExecutor] = []
        if attention is not None:
            for module in (slot_steps, graphs):
                patch.setattr(module, "DeviceStep", attention)
        shapes = tuple(graphs.prompt_shape(*size) for size in PROMPT_SIZES)
        patch.setattr(graphs, "PROMPT_SHAPES", shapes)
        backend = attention or step.TritonAttention
        patch.setattr("shoal.execute.model.model_set.choose_backend", lambda *arguments: backend)
        patch.setattr("shoal.execute.executors.make_executor", self._make)

    def _make(self, models: Any, layout: Any, *, depth: int = 1, **others: Any) -> GpuExecutor:
        made = GpuExecutor(models, layout, capturer=self.capturer, queue=self.queue, **others)
        self.executors.append(made)
        return made
