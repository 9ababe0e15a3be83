"""Probing a model before it serves: rejects models whose attention is more than what Shoal computes.

A model that computes something beside its calls of attention (linear attention, chunks, position biases,
sinks) would generate wrong text without an error. So each model runs two short prompts, packed into one
step, and the logits must equal those of its own attention. The probe also records every call of attention:
one per layer, without keywords that we do not implement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.core import ModelUnsupported
from shoal.execute.attention.transformers_hook import ATTENTION_NAME
from shoal.execute.model.record_attention import RecordingStep, packed_logits
from shoal.execute.model.transformers_forward import Forward, TransformersForward
from shoal.kvcache import LayerShape

PROMPT_LENGTHS = (7, 5)
TINY_WINDOW = 2

HARMLESS_KEYWORDS = frozenset(
    {
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords of attention that change nothing in inference over packed tokens."""

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Largest relative difference of logits (norm of the difference over norm) from rounding."""

RUN_ERRORS = (AttributeError, RuntimeError, TypeError, ValueError)
"""Errors of a model or layer that does not support the way it is called."""

INT8_TOLERANCE = 0.35
"""Tolerance after linear layers were quantised to int8: twice the largest difference seen (Gemma 3 270M)."""


def refuse_by_config(model_class: type, config: Any, name: str) -> None:
    """Raise ModelUnsupported if the configuration shows that our attention is not enough."""
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


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe."""

    layers: tuple[LayerShape, ...]
    prompts: tuple[torch.Tensor, ...]
    """Token ids of the prompts, each [1, length]."""
    logits: torch.Tensor
    """The model's logits for the prompts."""
    dtype: torch.dtype
    tolerance: float
    """Largest relative difference of logits from rounding."""

    def gives_same_logits(self, model: Any) -> bool:
        """Whether the changed model still gives these logits, up to rounding."""
        result = self.run_again(TransformersForward(model))
        return result is not None and self.difference(result) <= self.tolerance

    @torch.inference_mode()
    def run_again(self, forward: Forward) -> "ProbeResult | None":
        """The result with the logits that ``forward`` gives now; None if it cannot run."""
        try:
            return replace(self, logits=packed_logits(forward, self.prompts, RecordingStep(PROMPT_LENGTHS)))
        except RUN_ERRORS:
            return None

    def difference(self, other: "ProbeResult") -> float:
        """Relative difference between the logits of both."""
        return _difference(other.logits, self.logits)


@torch.inference_mode()
def probe(model: Any, name: str) -> ProbeResult:
    """Probe a loaded model; raises ModelUnsupported with the reason."""
    architecture = type(model).__name__
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    prompts = tuple(
        torch.randint(0, int(config.vocab_size), (1, n), generator=generator).to(model.device)
        for n in PROMPT_LENGTHS
    )
    step = RecordingStep(PROMPT_LENGTHS)
    dtype = next(model.parameters()).dtype
    try:
        ours = packed_logits(TransformersForward(model), prompts, step)
        _check_calls(step, config, name, architecture)
        theirs = _own_logits(model, prompts)
        hidden_window = _has_hidden_window(model, config, step, prompts, theirs)
    except RUN_ERRORS as error:
        raise ModelUnsupported(
            f"{name}: {architecture} cannot run over packed prompts: {type(error).__name__}: {error}"
        ) from error
    if hidden_window:
        raise ModelUnsupported(
            f"{name}: {architecture} applies sliding_window={config.sliding_window} through a mask and does "
            "not pass it to attention, where Shoal could see it"
        )
    difference = _difference(ours, theirs)
    if not difference <= TOLERANCE[dtype]:
        raise ModelUnsupported(
            f"{name}: with Shoal's attention the logits of {architecture} differ from its own by "
            f"{difference:.1%}; it must compute something that the attention interface does not show"
        )
    return ProbeResult(tuple(call.shape for call in step.calls), prompts, ours, dtype, TOLERANCE[dtype])


def _check_calls(step: RecordingStep, config: Any, name: str, architecture: str) -> None:
    layers = int(config.num_hidden_layers)
    called = [call.layer for call in step.calls]
    if called != list(range(layers)):
        raise ModelUnsupported(
            f"{name}: {architecture} has {layers} layers but called attention for layers {called}; "
            "some of its layers compute something else"
        )
    unknown = sorted(set(step.keywords) - HARMLESS_KEYWORDS - {"is_causal"})
    if unknown or step.keywords.get("is_causal") is False:
        raise ModelUnsupported(
            f"{name}: {architecture} passes {', '.join(unknown) or 'is_causal=False'} to attention, "
            "which Shoal does not implement"
        )
    kinds = list(getattr(config, "layer_types", None) or ())
    for call, kind in zip(step.calls, kinds, strict=False):
        if (kind == "sliding_attention") != (call.spec.window is not None):
            raise ModelUnsupported(
                f"{name}: layer {call.layer} of {architecture} is {kind} but passed "
                f"sliding_window={call.spec.window} to attention"
            )


def _own_logits(model: Any, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits of each prompt alone, with the model's own attention and masks."""
    model.set_attn_implementation("eager")
    try:
        return torch.cat([model(input_ids=ids, use_cache=False).logits[0] for ids in prompts])
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _has_hidden_window(
    model: Any, config: Any, step: RecordingStep, prompts: Sequence[torch.Tensor], theirs: torch.Tensor
) -> bool:
    """Whether a sliding window that is not passed to attention changes the logits of the model's own
    attention."""
    window = getattr(config, "sliding_window", None)
    if not window or any(call.spec.window for call in step.calls) or getattr(config, "layer_types", None):
        return False
    config.sliding_window = TINY_WINDOW
    try:
        return not torch.equal(_own_logits(model, prompts), theirs)
    finally:
        config.sliding_window = window


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected.float()).norm() / expected.float().norm())
