"""CUDA graphs of steps: hundreds of small kernels are launched as one.

Steps run the same kernels and differ only in buffer contents. So a step is captured once for each of some
shapes, when one is first needed, and replayed for all steps that fit into it. Padding attends nothing and
writes nothing. Larger steps run without graphs: the GPU needs longer for them than the host to launch them.
"""

import logging
from functools import partial

import torch

from shoal.execute.attention.kv_views import ServiceCache
from shoal.execute.cuda_graphs import CapturedGraph, GraphCapturer
from shoal.execute.gpu.batch import SlotState, StepShape, padding_words
from shoal.execute.gpu.step import DeviceStep
from shoal.execute.kv_pool_size import MAX_GRAPH_ROWS, MAX_GRAPH_TOKENS
from shoal.execute.model.transformers_forward import Forward
from shoal.execute.transfers import to_device

_FEW_ROWS = 64
_MOST_PROMPTS = 16
"""Of a captured step. Each may have a tile of its own, and tiles without tokens take time, too."""


def prompt_shape(tokens: int, rows: int) -> StepShape:
    """The shape of captured steps with prompts, and at most ``rows`` rows that decode or sample."""
    return StepShape(tokens, decodes=rows, sampled=rows, prompts=min(tokens // 2, _MOST_PROMPTS))


DECODE_SHAPES = tuple(
    StepShape.of_decodes(rows)
    for rows in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MAX_GRAPH_ROWS)
)  # fmt: skip
"""For which steps are captured in which all rows decode; the smallest first."""
PROMPT_SHAPES = (
    *(prompt_shape(tokens, tokens) for tokens in (16, 32, 64)),
    *(prompt_shape(tokens, _FEW_ROWS) for tokens in (128, 192, 256, 320, 384, 448, MAX_GRAPH_TOKENS)),
    *(prompt_shape(tokens, MAX_GRAPH_ROWS) for tokens in (256, 384, MAX_GRAPH_TOKENS)),
)
"""For which steps with prompts are captured; the first that a step fits into is taken."""

_log = logging.getLogger(__name__)


def graph_shape(step: StepShape) -> StepShape | None:
    """The captured shape for a step; None if there is none."""
    shapes = PROMPT_SHAPES if step.prompts else DECODE_SHAPES
    return next((shape for shape in shapes if step.fits(shape)), None)


def needed_shapes(rows: int, tokens: int) -> tuple[list[StepShape], list[StepShape]]:
    """Shapes that steps of up to ``rows`` rows and ``tokens`` tokens may need, the largest first: of steps
    with prompts, and of decodes."""
    limit = StepShape(tokens, rows, rows, rows)
    decodes = StepShape.of_decodes(min(rows, tokens))
    of_prompts = [shape for shape in PROMPT_SHAPES if graph_shape(shape.limited(limit)) == shape]
    of_decodes = [shape for shape in DECODE_SHAPES if graph_shape(shape.limited(decodes)) == shape]
    return of_prompts[::-1], of_decodes[::-1]


class GraphBuffers:
    """Buffers that captured steps read and write; smaller shapes use their begin.

    All models of a device share them, since no two of their steps run concurrently.
    """

    def __init__(self, device: torch.device) -> None:
        most = max(shape.words for shape in (*DECODE_SHAPES, *PROMPT_SHAPES))
        self.words = torch.zeros(most, dtype=torch.int32, device=device)
        """``StepNumbers.words`` of a step."""
        self._logits = torch.empty(0, dtype=torch.uint8, device=device)

    def logits(self, like: torch.Tensor) -> torch.Tensor:
        """Buffer for logits of the vocabulary and dtype of ``like``, [max rows, vocab]."""
        if len(self._logits) < (size := MAX_GRAPH_ROWS * like.shape[1] * like.element_size()):
            self._logits = self._logits.new_empty(size)  # graphs on the smaller buffer keep it
        return self._logits[:size].view(like.dtype).view(MAX_GRAPH_ROWS, -1)


class StepGraphs:
    """The captured steps of one model; they are valid for one view of the pool, and one SlotState as long as
    it does not grow."""

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
        self._graphs: dict[StepShape, CapturedGraph] = {}
        self._failed_shapes: set[StepShape] = set()

    @property
    def shapes(self) -> list[StepShape]:
        """Captured so far, in order."""
        return list(self._graphs)

    def takes(self, shape: StepShape) -> bool:
        """Whether steps of this shape can be replayed, as far as is known."""
        return shape not in self._failed_shapes

    def run(self, words: torch.Tensor, shape: StepShape) -> torch.Tensor | None:
        """Logits [shape.sampled, vocab] of a step with ``StepNumbers.words`` of this shape; valid until the
        next run. None if it cannot be captured."""
        self._buffers.words[: shape.words].copy_(words)
        graph = self._graphs.get(shape) or self._capture(shape)
        if graph is None:
            return None
        graph.replay()
        return graph.output

    def record(self, rows: int, tokens: int) -> None:
        """Capture all shapes that steps of up to so many rows and tokens need, before there are steps.

        The largest is the first, whose memory the others use. If one cannot be captured, the smaller ones are
        left to the steps that need them.
        """
        for shapes in needed_shapes(rows, tokens):
            for shape in shapes:
                if shape in self._graphs:
                    continue
                padding = to_device(padding_words(shape), self._buffers.words.device)
                self._buffers.words[: shape.words].copy_(padding)
                if self._capture(shape) is None:
                    break

    def _capture(self, shape: StepShape) -> CapturedGraph | None:
        """Capture the step in the buffers; tried once for each shape."""
        try:
            self._graphs[shape] = self._capturer.capture(partial(self._compute, shape))
        except Exception as error:
            # Out of memory, or the model's control flow depends on values on the device.
            self._failed_shapes.add(shape)
            _log.warning("steps of %s run without a CUDA graph: %s", shape, error)
            return None
        return self._graphs[shape]

    def _compute(self, shape: StepShape) -> torch.Tensor:
        """Logits of a step of this shape with the words in the buffers; valid until the next call."""
        buffers = self._buffers
        logits = compute(self._forward, buffers.words[: shape.words], shape, self._state, self._cache)
        return buffers.logits(logits)[: shape.sampled].copy_(logits)


def compute(
    forward: Forward, words: torch.Tensor, shape: StepShape, state: SlotState, cache: ServiceCache
) -> torch.Tensor:
    """Logits [shape.sampled, vocab] of a step with ``StepNumbers.words`` of this shape."""
    ids, sampled, inputs = state.inputs(words, shape)
    return forward(ids[None], inputs.positions[None], sampled, DeviceStep(inputs, cache))
