"""Replacing parts of a probed model by faster ones: decoder layers, then linear layers, then norms and MLPs.

Each step is undone if it changes the logits of the probe's prompts.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from shoal.execute.linear.merged_products import ProductBuilder
from shoal.execute.linear.packed_linear import Bf16Packing, dense_weight
from shoal.execute.model.fuse_norms_mlps import fused_norm_or_mlp
from shoal.execute.model.fused_forward import fused_forward
from shoal.execute.model.probe import ProbeResult
from shoal.execute.model.recognise_layers import RecognisedLayer, fused_layers
from shoal.execute.model.replace import Place, Rule, put_back, replace_modules
from shoal.execute.model.transformers_forward import Forward, TransformersForward

_log = logging.getLogger(__name__)


def apply_fusions(
    module: Any,
    probed: ProbeResult,
    layers: Sequence[RecognisedLayer],
    products: ProductBuilder | None,
    device: torch.device,
    *,
    onednn: bool = True,
) -> Forward:
    """Fuse and pack parts of ``module``; returns the fastest Forward for it.

    layers: its recognised decoder layers. products: for these layers; None to fuse none. onednn: whether
    oneDNN may pack weights.
    """
    if products is not None:
        _replace_if_same(module, probed, fused_layers(layers, products))
    if device.type == "cpu":
        _replace_if_same(module, probed, packed_linears(onednn=onednn))
    _replace_if_same(module, probed, fused_norm_or_mlp)
    plain, fused = TransformersForward(module), fused_forward(module, layers)
    if fused is None:
        return plain
    if not _same_logits(probed, plain, fused):
        _log.info("%s computes more around its layers, so transformers runs them", type(module).__name__)
        return plain
    return fused


def packed_linears(*, onednn: bool = True) -> Rule:
    """Packs plain bfloat16 linear layers, where that is faster; onednn: as in Bf16Packing."""
    packing = Bf16Packing(onednn=onednn)

    def rule(place: Place) -> Any:
        layer = place.module
        weight = dense_weight(layer)
        return None if weight is None else packing.pack(weight, layer.bias)

    return rule


def _replace_if_same(module: Any, probed: ProbeResult, rule: Rule) -> None:
    """Replace modules as ``rule`` says, unless the logits then differ."""
    originals = replace_modules(module, rule)
    if originals and not probed.gives_same_logits(module):
        put_back(originals)


def _same_logits(probed: ProbeResult, one: Forward, other: Forward) -> bool:
    """Whether both give bit-identical logits."""
    first, second = probed.run_again(one), probed.run_again(other)
    return first is not None and second is not None and torch.equal(first.logits, second.logits)
