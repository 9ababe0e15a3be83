"""CUDA graphs of decode steps: hundreds of small kernels are launched as one.

Steps in which all rows decode run the same kernels and differ only in buffer contents. So a step is captured
once for each size in ``GRAPH_SIZES`` when that size is first needed, and replayed. Padding rows have length
0: they attend nothing and write nothing.
"""

import logging
from bisect import bisect_left
from functools import partial

import torch

from shoal.execute.attention.kv_views import ServiceCache
from shoal.execute.cuda_graphs import CapturedGraph, GraphCapturer
from shoal.execute.gpu.batch import SlotState
from shoal.execute.gpu.step import DeviceStep, StepInputs
from shoal.execute.kv_pool_size import MAX_GRAPH_ROWS
from shoal.execute.model.transformers_forward import Forward

GRAPH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MAX_GRAPH_ROWS)
"""Numbers of rows for which steps are captured; larger steps run without graphs."""

_log = logging.getLogger(__name__)


def graph_size(rows: int) -> int | None:
    """The smallest captured size for so many rows; None if there is none."""
    return GRAPH_SIZES[bisect_left(GRAPH_SIZES, rows)] if rows <= GRAPH_SIZES[-1] else None


class GraphBuffers:
    """Buffers that captured steps read and write; smaller sizes use their begin.

    All models of a device share them, since no two of their steps run concurrently.
    """

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(4 * GRAPH_SIZES[-1], dtype=torch.int32, device=device)
        """``StepNumbers.words`` of a step."""
        self.rows = torch.arange(GRAPH_SIZES[-1], device=device)
        self._logits = torch.empty(0, dtype=torch.uint8, device=device)

    def logits(self, like: torch.Tensor) -> torch.Tensor:
        """Buffer for logits of the vocabulary and dtype of ``like``, [max rows, vocab]."""
        if len(self._logits) < (size := GRAPH_SIZES[-1] * like.shape[1] * like.element_size()):
            self._logits = self._logits.new_empty(size)  # graphs on the smaller buffer keep it
        return self._logits[:size].view(like.dtype).view(GRAPH_SIZES[-1], -1)


class DecodeGraphs:
    """The captured decode steps of one model; they are valid for one view of the pool, and one SlotState as
    long as it does not grow."""

    def __init__(
        self,
        forward: Forward,
        cache: ServiceCache,
        state: SlotState,
        buffers: GraphBuffers,
        capturer: GraphCapturer,
    ) -> None:
        self.view = cache.view
        """View of the pool that the graphs read and write."""
        self._cache = cache
        self._forward = forward
        self._state = state
        self._buffers = buffers
        self._capturer = capturer
        self._graphs: dict[int, CapturedGraph] = {}
        self._failed_sizes: set[int] = set()

    @property
    def sizes(self) -> list[int]:
        return sorted(self._graphs)

    def takes(self, size: int) -> bool:
        """Whether steps of this size can be replayed, as far as is known."""
        return size not in self._failed_sizes

    def run(self, words: torch.Tensor, size: int) -> torch.Tensor | None:
        """Logits [size, vocab] of a decode step with ``StepNumbers.words`` of ``size``, in its order; valid
        until the next run. None if it cannot be captured."""
        self._buffers.words[: len(words)].copy_(words)
        graph = self._graphs.get(size) or self._capture(size)
        if graph is None:
            return None
        graph.replay()
        return graph.output

    def record(self, rows: int) -> None:
        """Capture all sizes that steps of up to ``rows`` rows need, before there are steps.

        The largest is the first, whose memory the others use. Without memory for one, the others are left to
        the steps that need them.
        """
        most = graph_size(min(rows, GRAPH_SIZES[-1])) or 0
        for size in reversed(GRAPH_SIZES):
            if size <= most and size not in self._graphs:
                self._buffers.words.zero_()
                self._buffers.words[2 * size : 3 * size] = -1  # slots of padding
                if self._capture(size) is None:
                    return

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
        """Logits of ``size`` rows of the buffers; valid until the next call."""
        buffers, state = self._buffers, self._state
        given, positions, slots, lengths = buffers.words[: 4 * size].view(4, size)
        inputs = StepInputs(positions.long(), slots, lengths, state.tables)
        logits = self._forward(
            state.ids(given, slots)[None],
            inputs.positions[None],
            buffers.rows[:size],
            DeviceStep(inputs, self._cache),
        )
        return buffers.logits(logits)[:size].copy_(logits)
