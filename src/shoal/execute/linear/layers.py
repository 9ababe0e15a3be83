"""Interfaces of linear layers and of their merging, and dense layers in torch operations."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from shoal.execute.linear.native_product import Activation
from shoal.execute.model.layer_kernels import Kernels


class Linear(Protocol):
    """A linear layer of any weight format."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs]."""


class ProductBuilder(Protocol):
    """Builds merged and gated products of linear layers; see ``merged_products``."""

    @property
    def kernels(self) -> Kernels:
        """Kernels of norms and activations for the products' device."""

    def merged(self, linears: Sequence[Linear]) -> Linear:
        """One product for layers with the same input; their outputs are concatenated."""

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        """activation(gate(x)) * up(x)."""


class DenseLinear(nn.Module):
    """``nn.Linear`` that bypasses module hooks, which are not used here."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class GatedLinear(nn.Module):
    """activation(gate) * up of a layer whose output is gate and up, concatenated."""

    def __init__(self, both: Linear, activation: Activation, kernels: Kernels) -> None:
        super().__init__()
        self.both = both
        self.activation = activation
        self.kernels = kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs / 2]."""
        return self.kernels.gated_activation(self.both(x), self.activation)


class SeparateLinears(nn.Module):
    """Several layers with the same input, computed one after the other, so that no weight is copied."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__()
        self.linears = tuple(linears)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1)
