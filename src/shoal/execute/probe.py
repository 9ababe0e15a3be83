"""Seeing, before a model serves, that our attention is all the attention it has.

A model that computes something else beside the calls we get (linear attention, chunks, position
biases, sinks) would give wrong text without a sign. So each model answers two short prompts, packed
into one step as Shoal packs them, and the logits must equal those of its own implementation; on the
way the probe notes every call: one per layer, with no keyword whose meaning we do not implement.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.core import ModelUnsupported
from shoal.execute.attention_math import prefill_attention
from shoal.execute.interface import ATTENTION_NAME, STEP_KEYWORD
from shoal.kvcache import LayerShape

PROMPT_LENGTHS = (7, 5)

HARMLESS_KEYWORDS = frozenset(
    {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
)
"""Keywords that reach attention and change nothing in inference over packed tokens."""

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Largest relative difference (norm of the difference over norm) that rounding explains."""


@dataclass(slots=True)
class RecordingStep:
    """Plain causal attention over packed whole prompts that notes every call."""

    lengths: tuple[int, ...]
    calls: list[int] = field(default_factory=list)
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)

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
        """See AttentionStep; prompts are shorter than any window worth the name."""
        self.calls.append(layer)
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.windows[layer] = window
        self.keywords.update({name: v for name, v in extra.items() if v is not None})
        outputs, start = [], 0
        for length in self.lengths:
            part = slice(start, start + length)
            outputs.append(prefill_attention(query[part], key[part], value[part], None, scaling, softcap))
            start += length
        return torch.cat(outputs)


def refuse_by_config(model_class: type, config: Any, name: str) -> None:
    """Refuse architectures that say themselves that our attention is not enough.

    Raises:
        ModelUnsupported: naming the architecture and what it would need.
    """
    architecture = model_class.__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(
            f"{name}: {architecture} is an encoder-decoder; Shoal serves decoder-only models"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    foreign = sorted(kinds - {"full_attention", "sliding_attention", "attention"})
    if foreign:
        raise ModelUnsupported(
            f"{name}: {architecture} has layers of type {', '.join(foreign)}; "
            "Shoal computes full_attention and sliding_attention layers"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelUnsupported(
            f"{name}: {architecture} does not use the attention interface of transformers, "
            "so its attention cannot be paged"
        )


@torch.inference_mode()
def probe(model: Any, name: str) -> tuple[LayerShape, ...]:
    """Run the probe on a loaded model and return the KV shape of each layer.

    Raises:
        ModelUnsupported: with what was seen.
    """
    config = model.config.get_text_config()
    device, vocab = model.device, int(config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, vocab, (1, n), generator=generator).to(device) for n in PROMPT_LENGTHS]
    step = RecordingStep(PROMPT_LENGTHS)
    ours = packed_logits(model, prompts, step)
    _check_calls(step, config, name, type(model).__name__)
    _check_logits(model, prompts, ours, name)
    return tuple(step.shapes[layer] for layer in range(len(step.shapes)))


def packed_logits(model: Any, prompts: list[torch.Tensor], step: RecordingStep) -> torch.Tensor:
    """Logits [tokens, vocab] of whole prompts, packed into one step as `step.lengths` says."""
    positions = torch.cat([torch.arange(n) for n in step.lengths]).unsqueeze(0).to(model.device)
    output = model(
        input_ids=torch.cat(prompts, dim=1), position_ids=positions, use_cache=False, **{STEP_KEYWORD: step}
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _check_calls(step: RecordingStep, config: Any, name: str, architecture: str) -> None:
    layers = int(config.num_hidden_layers)
    if step.calls != list(range(layers)):
        raise ModelUnsupported(
            f"{name}: {architecture} has {layers} layers but called attention for layers {step.calls}; "
            "some of its layers compute something else"
        )
    unknown = sorted(set(step.keywords) - HARMLESS_KEYWORDS - {"is_causal"})
    if unknown or step.keywords.get("is_causal") is False:
        raise ModelUnsupported(
            f"{name}: {architecture} passes {', '.join(unknown) or 'is_causal=False'} to attention, "
            "which Shoal does not implement"
        )
    kinds = list(getattr(config, "layer_types", None) or ())
    for layer, kind in enumerate(kinds):
        if (kind == "sliding_attention") != (step.windows[layer] is not None):
            raise ModelUnsupported(
                f"{name}: layer {layer} of {architecture} is {kind} but passed "
                f"sliding_window={step.windows[layer]} to attention"
            )


def _check_logits(model: Any, prompts: list[torch.Tensor], ours: torch.Tensor, name: str) -> None:
    model.set_attn_implementation("eager")
    try:
        theirs = torch.cat([model(input_ids=ids, use_cache=False).logits[0] for ids in prompts])
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not difference <= TOLERANCE[ours.dtype]:
        raise ModelUnsupported(
            f"{name}: with Shoal's attention the logits of {type(model).__name__} differ from its own by "
            f"{difference:.1%}; it must compute something that the attention interface does not show"
        )
