"""Applying layer fusion and prepacking to a probed model; each step is undone if it changes the logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.execute.linear.prepack import prepack
from shoal.execute.model.fuse_decoder_layers import RecognisedLayer, fuse_layers, fused_forward
from shoal.execute.model.fuse_norms_mlps import fuse
from shoal.execute.model.probe import ProbeResult
from shoal.execute.model.replacements import Replacements
from shoal.execute.model.transformers_forward import Forward, TransformersForward


def apply_fusions(
    module: Any, probed: ProbeResult, layers: Sequence[RecognisedLayer], device: torch.device
) -> Forward:
    """Fuse and prepack ``module``; returns the fastest Forward for it.

    layers: its recognised decoder layers.
    """
    passes: list[Callable[[Any], Replacements]] = [prepack, fuse] if device.type == "cpu" else [fuse]
    if layers:
        passes.insert(0, lambda _: fuse_layers(layers))
    for apply in passes:
        replacements = apply(module)
        if not probed.gives_same_logits(module):
            replacements.undo()
    plain, fused = TransformersForward(module), fused_forward(module, layers)
    return fused if fused is not None and _same_logits(probed, plain, fused) else plain


def _same_logits(probed: ProbeResult, one: Forward, other: Forward) -> bool:
    """Whether both give bit-identical logits."""
    first, second = probed.run_again(one), probed.run_again(other)
    return first is not None and second is not None and torch.equal(first.logits, second.logits)
