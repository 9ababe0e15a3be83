"""Int8Linear: linear layers with int8 weights, whose inputs are quantised on the fly in groups of 32.

Sums of groups are exact integers and are added in order, so the result has the same bits on every
instruction set and for any batch, chunking and number of threads.
"""

from typing import Self

import torch
from torch import nn

from shoal.execute.linear.int8_product import Int8Product
from shoal.execute.linear.int8_weights import Int8Weights, pack, quantise_channels
from shoal.execute.linear.native_product import Activation
from shoal.native import NativeLibrary, load_native


class Int8Linear(nn.Module):
    """x [..., in_features], float32 or bfloat16, to [..., out_features] in the same dtype.

    native: library of the kernel; None for torch operations, which compute the same bits slowly.
    """

    def __init__(self, weights: Int8Weights, native: NativeLibrary | None) -> None:
        super().__init__()
        self.weights = weights
        self.native = native
        self.in_features = weights.in_features
        self.out_features = weights.out_features
        self._product = Int8Product([weights], native)

    @classmethod
    def from_weight(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """From a dense weight [out_features, in_features], quantised per output channel."""
        return cls(pack(*quantise_channels(weight), bias), load_native())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Bypasses module hooks, which are not used here."""
        return self._product(x)

    def gated(self, factor: Self, activation: Activation) -> Int8Product:
        """activation(this layer) * factor."""
        return Int8Product([self.weights, factor.weights], self.native, activation)
