"""Applying layer fusion and prepacking to a probed model; each step is undone if it changes the logits."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shoal.execute.linear.layers import ProductBuilder
from shoal.execute.linear.prepack import prepack
from shoal.execute.model.fuse_decoder_layers import RecognisedLayer, fuse_layers, fused_forward
from shoal.execute.model.fuse_norms_mlps import fuse
from shoal.execute.model.probe import ProbeResult
from shoal.execute.model.replacements import Replacements
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
    """Fuse and prepack ``module``; returns the fastest Forward for it.

    layers: its recognised decoder layers. products: for these layers; None to fuse none. onednn: whether
    oneDNN may pack weights.
    """
    passes: list[Callable[[Any], Replacements]] = [fuse]
    if device.type == "cpu":
        passes.insert(0, partial(prepack, onednn=onednn))
    if products is not None:
        passes.insert(0, lambda _: fuse_layers(layers, products))
    for apply in passes:
        replacements = apply(module)
        if not probed.gives_same_logits(module):
            replacements.undo()
    plain, fused = TransformersForward(module), fused_forward(module, layers)
    if fused is None:
        return plain
    if not _same_logits(probed, plain, fused):
        _log.info("%s computes more around its layers, so transformers runs them", type(module).__name__)
        return plain
    return fused


def _same_logits(probed: ProbeResult, one: Forward, other: Forward) -> bool:
    """Whether both give bit-identical logits."""
    first, second = probed.run_again(one), probed.run_again(other)
    return first is not None and second is not None and torch.equal(first.logits, second.logits)
