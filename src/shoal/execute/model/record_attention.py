"""Running a model over packed prompts without a KV pool, and recording its calls of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shoal.execute.attention.packed_qkv import PackedQKV
from shoal.execute.attention.sdpa import additive_mask, prefill_attention, visible_keys
from shoal.execute.attention.spec import AttentionSpec
from shoal.execute.model.transformers_forward import Forward
from shoal.kvcache import LayerShape


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A layer's call of attention."""

    layer: int
    heads: int
    """Query heads."""
    shape: LayerShape
    spec: AttentionSpec
    """Without its ``extra``, which may hold tensors."""


@dataclass(slots=True)
class RecordingStep(PackedQKV):
    """Causal attention over packed whole prompts; records every call."""

    lengths: tuple[int, ...]
    calls: list[RecordedCall] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    """Other keywords that were passed with a value."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        shape = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.calls.append(RecordedCall(layer, query.shape[1], shape, replace(spec, extra={})))
        self.keywords.update({name: v for name, v in spec.extra.items() if v is not None})
        outputs, start = [], 0
        for length in self.lengths:
            part = slice(start, start + length)
            mask = _window_mask(length, spec.window, query)
            outputs.append(prefill_attention(query[part], key[part], value[part], mask, spec))
            start += length
        return torch.cat(outputs)


def _window_mask(length: int, window: int | None, query: torch.Tensor) -> torch.Tensor | None:
    if window is None or length <= window:
        return None
    positions = torch.arange(length, device=query.device)
    return additive_mask(visible_keys(positions, positions, window), query.dtype)


def packed_logits(forward: Forward, prompts: Sequence[torch.Tensor], step: RecordingStep) -> torch.Tensor:
    """Logits [tokens, vocab] of whole prompts [1, length], packed into one step as ``step.lengths`` says."""
    input_ids = torch.cat(list(prompts), dim=1)
    positions = torch.cat([torch.arange(n) for n in step.lengths]).unsqueeze(0).to(input_ids.device)
    rows = torch.arange(input_ids.shape[1], device=input_ids.device)
    return forward(input_ids, positions, rows, step)
