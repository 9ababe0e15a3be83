"""Linear layers by what they compute, whatever form their weights have."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn


class Linear(Protocol):
    """A matrix product, and perhaps a bias."""

    in_features: int
    """Size of an input row."""
    out_features: int
    """Size of an output row."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""


MergeLinears = Callable[[Sequence[Linear]], Linear]
"""Makes one layer of several that have the same input: its output has theirs side by side."""


class DenseLinear(nn.Module):
    """``nn.Linear`` without module hooks, which are not used here."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return F.linear(x, self.weight, self.bias)


class SeparateLinears(nn.Module):
    """Several layers with the same input, one after the other: a layer for which no weight is copied."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)  # type: ignore[arg-type]  # all are modules
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return torch.cat([linear(x) for linear in self.linears], dim=-1)
