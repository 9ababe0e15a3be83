"""Recognising decoder layers that are built like Llama's, and the rule that puts a ``DecoderLayer`` there.

A layer is recognised by the names and shapes of its parts. What these do not show (the activation, the
pairing of rotary dimensions, other computations) is found by trial: one of the candidate replacements must
give the output of the layer itself for the probe's prompts, both in float32.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeGuard

import torch
from torch import nn

from shoal.execute.attention.transformers_hook import STEP_KEYWORD
from shoal.execute.linear.layer_kernels import Kernels
from shoal.execute.linear.merged_products import ProductBuilder
from shoal.execute.linear.native_product import GATE_ACTIVATIONS
from shoal.execute.linear.packed_linear import PackedLinear
from shoal.execute.model.decoder_layer import DecoderLayer, LayerParts, LayerStyle
from shoal.execute.model.fuse_norms_mlps import FusedRMSNorm, fused_norm
from shoal.execute.model.probe import RUN_ERRORS, ProbeResult
from shoal.execute.model.record_attention import RecordedCall, RecordingStep, packed_logits
from shoal.execute.model.replace import Place, Rule, places
from shoal.execute.model.transformers_forward import TransformersForward

TOLERANCE = 1e-4
"""Largest relative difference (norm over norm) of a layer's residual update, from the order of sums."""

_QKV = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """The rotary embedding of some of a model's layers."""

    module: nn.Module
    """Computes cosines and sines from hidden states and positions."""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def compute(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, tokens, n], in the dtype of x."""
        cos, sin = self.module(x, positions, *self.arguments, **self.keywords)
        return cos, sin


@dataclass(frozen=True, slots=True)
class RecognisedLayer:
    """A decoder layer that a DecoderLayer can replace, also after its linear layers were replaced."""

    place: Place
    attention: RecordedCall
    style: LayerStyle
    rotary: RotaryTable | None
    """Source of its cosines and sines; None if that was not observed."""


@torch.inference_mode()
def recognise_layers(model: nn.Module, probed: ProbeResult, kernels: Kernels) -> list[RecognisedLayer]:
    """The layers of ``model`` that can be replaced, while its linear layers are dense; [] if the kernels do
    not support its dtype."""
    if probed.dtype not in kernels.dtypes:
        return []
    styles = [LayerStyle(*pair) for pair in product(GATE_ACTIVATIONS, (False, True))]
    layers = []
    for observed in _observe_layers(model, probed):
        style = _best_style(observed, styles, kernels)
        if style is not None:
            styles = [style]  # the same for all layers of a model
            layers.append(RecognisedLayer(observed.place, observed.attention, style, observed.rotary))
    return layers


def fused_layers(layers: Sequence[RecognisedLayer], products: ProductBuilder) -> Rule:
    """Replaces recognised layers."""
    recognised = {layer.place: layer for layer in layers}

    def rule(place: Place) -> DecoderLayer | None:
        layer = recognised.get(place)
        parts = None if layer is None else _parts(place.module, layer.attention)
        return None if layer is None or parts is None else DecoderLayer(parts, layer.style, products)

    return rule


@dataclass(frozen=True, slots=True)
class _ObservedLayer:
    """A layer's call during a run of the probe's prompts."""

    place: Place
    attention: RecordedCall
    lengths: tuple[int, ...]
    """Of the prompts."""
    hidden_states: torch.Tensor
    keywords: dict[str, Any]
    """All arguments but the hidden states."""
    rotary: RotaryTable | None

    def run(self, layer: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        """The residual update by ``layer`` if it is called in the same way, in float32.

        None if that fails, for instance because of other tensors in the model's dtype.
        """
        given = self.hidden_states.float()
        keywords = self.keywords | {STEP_KEYWORD: RecordingStep(self.lengths)}
        keywords["position_embeddings"] = tuple(part.float() for part in keywords["position_embeddings"])
        try:
            return layer(given, **keywords) - given
        except RUN_ERRORS:
            return None


def _observe_layers(model: nn.Module, probed: ProbeResult) -> list[_ObservedLayer]:
    """Calls of all modules that contain attention and MLP and have the calling convention of Llama's
    layers."""
    step = RecordingStep(tuple(ids.shape[1] for ids in probed.prompts))
    layers = {place.module: place for place in places(model) if _is_layer(place.module)}
    tables: list[tuple[torch.Tensor, RotaryTable]] = []
    observed: list[_ObservedLayer] = []

    def table_hook(module: nn.Module, args: Any, keywords: dict[str, Any], output: Any) -> None:
        if _is_cos_sin(output) and len(args) + ("position_ids" in keywords) >= 2:
            others = {name: value for name, value in keywords.items() if name != "position_ids"}
            tables.append((output[0], RotaryTable(module, args[2:], others)))

    def layer_hook(module: nn.Module, args: Any, keywords: dict[str, Any], output: Any) -> None:
        angles = keywords.get("position_embeddings")
        if len(args) == 1 and isinstance(output, torch.Tensor) and _is_cos_sin(angles):
            table = next((table for cos, table in tables if cos is angles[0]), None)
            call = step.calls[-1]
            observed.append(_ObservedLayer(layers[module], call, step.lengths, args[0], keywords, table))

    watched = dict.fromkeys(layers, layer_hook)
    watched |= {part: table_hook for part in model.modules() if "Rotary" in type(part).__name__}
    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in watched.items()]
    try:
        packed_logits(TransformersForward(model), probed.prompts, step)
    finally:
        for handle in hooks:
            handle.remove()
    return observed


def _is_cos_sin(angles: Any) -> TypeGuard[tuple[torch.Tensor, torch.Tensor]]:
    """Whether these position embeddings are (cosines, sines); those of DeepSeek-V2 are one complex tensor."""
    if not isinstance(angles, tuple) or len(angles) != 2:
        return False
    return all(isinstance(part, torch.Tensor) and part.is_floating_point() for part in angles)


def _is_layer(module: nn.Module) -> bool:
    return hasattr(module, "self_attn") and hasattr(module, "mlp")


def _best_style(
    observed: _ObservedLayer, styles: Sequence[LayerStyle], kernels: Kernels
) -> LayerStyle | None:
    """The style whose layer is closest to the observed one; None if none is within TOLERANCE."""
    module = observed.place.module
    if _parts(module, observed.attention) is None:
        return None
    original = deepcopy(module, _in_float32(module)).float()
    parts = _parts(original, observed.attention)
    assert parts is not None
    theirs = observed.run(original)
    if theirs is None:
        return None
    best, least = None, TOLERANCE
    for style in styles:
        ours = observed.run(DecoderLayer(parts, style, ProductBuilder(kernels)))
        if ours is None:
            return None
        difference = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
        if difference <= least:
            best, least = style, difference
    return best


def _in_float32(module: nn.Module) -> dict[int, Any]:
    """Float32 parameters for a copy of a module, as a memo for ``deepcopy``."""
    copies = {id(p): p.to(torch.float32, copy=True) for p in module.parameters()}
    return {name: nn.Parameter(copy, requires_grad=False) for name, copy in copies.items()}


def _parts(layer: nn.Module, call: RecordedCall) -> LayerParts | None:
    """The parts of a layer; None if it has unknown parts."""
    own = _children_with_weights(layer)
    attention, mlp = (_children_with_weights(own.pop(name, nn.Identity())) for name in ("self_attn", "mlp"))
    head_norms = {name: attention.pop(name) for name in _HEAD_NORMS if name in attention}
    if not (
        own.keys() in (set(_NORMS), set(_FOUR_NORMS))
        and attention.keys() == {*_QKV, "o_proj"}
        and mlp.keys() == {"gate_proj", "up_proj", "down_proj"}
    ):
        return None
    norms = {name: fused_norm(module) for name, module in (own | head_norms).items()}
    return _assemble(attention | mlp, norms, call)


def _assemble(
    modules: dict[str, nn.Module], norms: dict[str, FusedRMSNorm | None], call: RecordedCall
) -> LayerParts | None:
    """The parts from linear layers and norms by name; None if their kinds or shapes are not supported."""
    found = {name: norm for name, norm in norms.items() if norm is not None}
    eps = {norm.eps for norm in found.values()}
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear | PackedLinear)}
    if len(found) != len(norms) or len(eps) != 1 or len(linears) != len(modules):
        return None
    shape = call.shape
    widths = (call.heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim)
    if tuple(linears[name].out_features for name in _QKV) != widths:
        return None
    if any(name in found and found[name].size != (shape.key_dim,) for name in _HEAD_NORMS):
        return None
    scales = {name: norm.scale.float() for name, norm in found.items()}
    four = len(scales.keys() & set(_FOUR_NORMS)) == 4
    return LayerParts(
        attention=call,
        qkv=tuple(linears[name] for name in _QKV),
        o=linears["o_proj"],
        gate=linears["gate_proj"],
        up=linears["up_proj"],
        down=linears["down_proj"],
        before_attention=scales["input_layernorm"],
        after_attention=scales["post_attention_layernorm"] if four else None,
        before_mlp=scales["pre_feedforward_layernorm" if four else "post_attention_layernorm"],
        after_mlp=scales.get("post_feedforward_layernorm"),
        q_norm=scales.get("q_norm"),
        k_norm=scales.get("k_norm"),
        eps=eps.pop(),
    )


def _children_with_weights(module: nn.Module) -> dict[str, nn.Module]:
    """Children of ``module`` with weights, by name; the module itself as "" if it has own weights."""
    own = {"": module} if next(module.parameters(recurse=False), None) is not None else {}
    return own | {name: child for name, child in module.named_children() if _has_weights(child)}


def _has_weights(module: nn.Module) -> bool:
    return any(isinstance(part, PackedLinear) for part in module.modules()) or any(
        True for _ in module.parameters()
    )
