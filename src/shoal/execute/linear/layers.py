"""Linear layers by what they compute, whatever form their weights have."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from shoal.execute.linear.native_product import Activation
from shoal.execute.model.layer_kernels import LayerKernels


class Linear(Protocol):
    """A matrix product, and perhaps a bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs]."""


class Products(Protocol):
    """Makes matrix products of linear layers, in the form in which this CPU computes them fastest."""

    def merged(self, linears: Sequence[Linear]) -> Linear:
        """One for several layers with the same input: its output has theirs side by side."""

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        """activation(gate(x)) * up(x)."""


class DenseLinear(nn.Module):
    """``nn.Linear`` without module hooks, which are not used here."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return F.linear(x, self.weight, self.bias)


class GatedLinear(nn.Module):
    """activation(gate) * up of a layer whose output is gate and up beside each other."""

    def __init__(self, both: Linear, activation: Activation, kernels: LayerKernels) -> None:
        super().__init__()
        self.both = both
        self.activation = activation
        self.kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs / 2]."""
        return self.kernels.gated_activation(self.both(x), self.activation)


class SeparateLinears(nn.Module):
    """Several layers with the same input, one after the other: a layer for which no weight is copied."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__()
        self.linears = tuple(linears)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return torch.cat([linear(x) for linear in self.linears], dim=-1)
