"""Making a probed model fast, as far as it then still gives the probed logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.execute.linear.prepack import prepack
from shoal.execute.model.fuse_decoder_layers import RecognisedLayer, fuse_layers, fused_forward
from shoal.execute.model.fuse_norms_mlps import fuse
from shoal.execute.model.probe import Probed
from shoal.execute.model.replacements import Replacements
from shoal.execute.model.transformers_forward import Forward, TransformersForward


def speed_up(module: Any, probed: Probed, layers: Sequence[RecognisedLayer], device: torch.device) -> Forward:
    """Fuse and prepack ``module``; returns the fastest way to run it.

    layers: those of its layers that were recognised. Each kind of change that changes the logits is undone.
    """
    ways: list[Callable[[Any], Replacements]] = [prepack, fuse] if device.type == "cpu" else [fuse]
    if layers:
        ways.insert(0, lambda _: fuse_layers(layers))
    for way in ways:
        replacements = way(module)
        if not probed.still_answered_by(module):
            replacements.undo()
    plain, fused = TransformersForward(module), fused_forward(module, layers)
    return fused if fused is not None and _give_the_same(probed, plain, fused) else plain


def _give_the_same(probed: Probed, one: Forward, other: Forward) -> bool:
    """Whether both give the very same logits."""
    first, second = probed.answered_by(one), probed.answered_by(other)
    return first is not None and second is not None and torch.equal(first.logits, second.logits)
