"""Replacing parts of a model by fewer, larger operations that compute the same.

A part is recognised by its shape (a norm with one weight; gate, up and down projections) and replaced
only if the replacement gives the same output on random input, so an architecture that means something
else by the same names keeps its own code.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shoal.execute.prepack import GATE_ACTIVATIONS, PackedGatedMLP, PackedLinear
from shoal.execute.replacements import Replacements, children

NORM_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}
"""Largest relative difference (norm over norm) of a fused norm: one rounding of its output."""

MLP_TOLERANCE = 2e-2
"""The same for a gated MLP in bfloat16, whose inner sums are rounded in other places."""


class FusedRMSNorm(nn.Module):
    """Root-mean-square norm in one operation.

    A scale of higher precision than the input is kept: for models that scale by 1 + weight, bfloat16 has no
    digits for a small weight.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.scale = weight
        self.eps = eps
        self.size = tuple(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> [..., size]; without module hooks, which are not used here."""
        return F.rms_norm(x.to(self.scale.dtype), self.size, self.scale, self.eps).to(x.dtype)


@torch.inference_mode()
def fuse(model: nn.Module) -> Replacements:
    """Replace norms, and gated MLPs of prepacked layers, in ``model``."""
    replacements = Replacements()
    for parent, name, child in children(model):
        for candidate, features, dtype, tolerance in (*_norms(child), *_gated_mlps(child)):
            if _difference(child, candidate, features, dtype) <= tolerance:
                replacements.put(parent, name, child, candidate)
                break
    return replacements


Candidate = tuple[nn.Module, int, torch.dtype, float]
"""A replacement, the size of its input's last dimension, its dtype, and the tolerance."""


def _norms(module: Any) -> list[Candidate]:
    if "RMSNorm" not in type(module).__name__:
        return []
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return []
    weight = weight.detach()
    tolerance = NORM_TOLERANCE[weight.dtype]
    scales = (weight, weight.float() + 1)
    return [(FusedRMSNorm(scale, eps), len(weight), weight.dtype, tolerance) for scale in scales]


def _gated_mlps(module: Any) -> list[Candidate]:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    gate, up, down = parts
    if not (
        isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, PackedLinear)
    ):
        return []
    return [
        (PackedGatedMLP(gate, up, down, activation), gate.in_features, torch.bfloat16, MLP_TOLERANCE)
        for activation in GATE_ACTIVATIONS
    ]


def _difference(
    original: Callable[..., Any], candidate: nn.Module, features: int, dtype: torch.dtype
) -> float:
    """Relative difference of the outputs on random input; infinite if they cannot be compared."""
    generator = torch.Generator().manual_seed(0)
    device = next((p.device for p in getattr(original, "parameters", list)()), torch.device("cpu"))
    x = torch.randn((3, features), generator=generator).to(device, dtype)
    try:
        theirs, ours = original(x), candidate(x)
    except (TypeError, ValueError, RuntimeError):
        return float("inf")
    if not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return float("inf")
    return float((theirs.float() - ours.float()).norm() / theirs.float().norm().clamp_min(1e-30))
