"""Bf16Linear: linear layers with bfloat16 weights, summed in float32 by a native kernel.

If the CPU's bfloat16 dot products are no faster than float32, the kernel widens weights in registers. A
row's result has the same bits in any batch, chunking and number of threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from shoal.execute.huge_pages import HugePages
from shoal.execute.linear.native_product import Activation, NativeProduct
from shoal.native import NativeLibrary, load_native

GROUP = PANEL = 32
"""Inputs and outputs are padded to multiples of these."""


@dataclass(frozen=True, slots=True)
class Bf16Weights:
    """The weights of a linear layer as the kernel reads them; see NativeWeights."""

    in_features: int
    out_features: int
    packed: torch.Tensor
    """bfloat16 [panels, inputs / 2, 32, 2]."""
    bias: torch.Tensor | None
    """float32 [panels, 32]."""
    scales: None = None
    grouped: bool = False


def pack_bf16(weight: torch.Tensor, bias: torch.Tensor | None, memory: HugePages) -> Bf16Weights:
    """Pack weight [out, in] and bias [out] into ``memory``."""
    rows, columns = weight.shape
    padded = F.pad(weight.detach(), (0, -columns % GROUP, 0, -rows % PANEL))
    pairs = padded.contiguous().view(torch.int32).view(-1, PANEL, padded.shape[1] // 2).transpose(1, 2)
    packed = memory.put(pairs).view(torch.bfloat16).view(*pairs.shape, 2)
    if bias is not None:
        bias = F.pad(bias.detach().float(), (0, -rows % PANEL)).view(-1, PANEL)
    return Bf16Weights(columns, rows, packed, bias)


class Bf16Linear(nn.Module):
    """x [..., in_features], bfloat16, to [..., out_features]."""

    def __init__(self, weights: Bf16Weights, native: NativeLibrary) -> None:
        super().__init__()
        self.weights = weights
        self.native = native
        self.in_features, self.out_features = weights.in_features, weights.out_features
        self._product = bf16_product([weights], native)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Bypasses module hooks, which are not used here."""
        return self._product(x)

    def gated(self, factor: Self, activation: Activation) -> NativeProduct:
        """activation(this layer) * factor."""
        return bf16_product([self.weights, factor.weights], self.native, activation)


def bf16_product(
    parts: Sequence[Bf16Weights], native: NativeLibrary, activation: Activation = Activation.NONE
) -> NativeProduct:
    return NativeProduct(native, "shoal_bf16_product", parts, activation)


@dataclass(frozen=True, slots=True)
class Bf16Packing:
    """Packs bfloat16 layers for the native kernel."""

    native: NativeLibrary
    memory: HugePages
    """Holds the packed weights."""

    @classmethod
    def for_this_cpu(cls) -> Self | None:
        """None without AVX2, where torch is faster."""
        native = load_native()
        if native is None or native.variant == "scalar":
            return None
        return cls(native, HugePages())

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Bf16Linear:
        """A layer with weight [out, in] and bias [out] in bfloat16."""
        return Bf16Linear(pack_bf16(weight, bias, self.memory), self.native)
