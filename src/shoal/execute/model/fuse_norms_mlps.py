"""Rules that fuse RMS norms and gated MLPs of a `transformers` model into fewer, larger operations.

A module is recognised by its structure (a norm with one weight; gate, up and down projections) and replaced
only if the replacement gives the same output on random input, so an architecture that uses the same names
for something else keeps its own code.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from shoal.execute.linear.native_product import GATE_ACTIVATIONS, Activation
from shoal.execute.linear.packed_linear import OnednnGatedProduct, OnednnLinear, PackedLinear, joint_product
from shoal.execute.model.replace import Place

NORM_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest relative difference (norm over norm) of a fused norm: one unit in the last place, for outputs in
which one element dominates."""

MLP_TOLERANCE = 2e-2
"""Largest relative difference of a gated MLP in bfloat16 or int8, whose sums are rounded differently."""


class FusedRMSNorm(nn.Module):
    """RMS norm in one operation.

    The scale may have a higher precision than the input: in models that scale by 1 + weight, bfloat16 loses
    small weights.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.scale = weight
        self.eps = eps
        self.size = tuple(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> [..., size]; bypasses module hooks, which are not used here."""
        return F.rms_norm(x.to(self.scale.dtype), self.size, self.scale, self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """down(gated(x)), with gated(x) = activation(gate(x)) * up(x) in one product or two."""

    def __init__(self, gated: Callable[[torch.Tensor], torch.Tensor], down: nn.Module) -> None:
        super().__init__()
        self.gated, self.down = gated, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] -> [..., hidden]; bypasses module hooks, which are not used here."""
        result: torch.Tensor = self.down(self.gated(x))
        return result


def fused_norm_or_mlp(place: Place) -> FusedRMSNorm | GatedMLP | None:
    """Replaces norms, and gated MLPs of packed layers."""
    return fused_norm(place.module) or _fused_mlp(place.module)


def fused_norm(module: Any) -> FusedRMSNorm | None:
    """A fused norm equivalent to ``module``; None if it is no RMS norm of a known kind."""
    if "RMSNorm" not in type(module).__name__:
        return None
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    weight = weight.detach()
    candidates = [FusedRMSNorm(scale, eps) for scale in (weight, weight.float() + 1)]
    return _closest(module, candidates, len(weight), weight.dtype, NORM_TOLERANCE[weight.dtype])


def _fused_mlp(module: Any) -> GatedMLP | None:
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if {type(part) for part in parts} not in ({PackedLinear}, {OnednnLinear}):
        return None
    gate, up, down = parts
    products = [_gated_product(gate, up, activation) for activation in GATE_ACTIVATIONS]
    candidates = [GatedMLP(product, down) for product in products if product is not None]
    if not candidates:
        return None
    return _closest(module, candidates, gate.in_features, torch.bfloat16, MLP_TOLERANCE)


def _gated_product(
    gate: Any, up: Any, activation: Activation
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """activation(gate) * up; None for layers of different formats."""
    if isinstance(gate, OnednnLinear):
        return OnednnGatedProduct(gate, up, activation)
    return joint_product((gate, up), activation)


Candidate = TypeVar("Candidate", bound=nn.Module)


def _closest(
    original: nn.Module, candidates: Sequence[Candidate], features: int, dtype: torch.dtype, tolerance: float
) -> Candidate | None:
    """The candidate closest to ``original`` on random input; None if none is within ``tolerance``."""
    differences = [_difference(original, candidate, features, dtype) for candidate in candidates]
    least = min(differences)
    return candidates[differences.index(least)] if least <= tolerance else None


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
