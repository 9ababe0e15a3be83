"""The matrix products of fused layers, in the form in which this CPU computes them fastest."""

from collections.abc import Sequence

import torch
from torch import nn

from shoal.execute.int8_linear import Int8Linear
from shoal.execute.int8_product import Activation, Int8Product
from shoal.execute.layer_kernels import LayerKernels
from shoal.execute.linear import DenseLinear, GatedLinear, Linear, SeparateLinears
from shoal.execute.prepack import PackedLinear, can_prepack


class FastProducts:
    """Products: of ``nn.Linear`` with their weights side by side, and of Int8Linear with those they have."""

    def __init__(self, kernels: LayerKernels) -> None:
        self._kernels = kernels

    def merged(self, linears: Sequence[Linear]) -> Linear:
        """See Products."""
        int8 = [linear for linear in linears if isinstance(linear, Int8Linear)]
        dense = [linear for linear in linears if isinstance(linear, nn.Linear)]
        if len(int8) == len(linears):
            return Int8Product([linear.weights for linear in int8], int8[0].native)
        return _merged_dense(dense) if len(dense) == len(linears) else SeparateLinears(linears)

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        """See Products."""
        if isinstance(gate, Int8Linear) and isinstance(up, Int8Linear):
            return Int8Product([gate.weights, up.weights], gate.native, activation)
        return GatedLinear(self.merged((gate, up)), activation, self._kernels)


class SeparateProducts:
    """Products for a trial: no weight is copied."""

    def __init__(self, kernels: LayerKernels) -> None:
        self._kernels = kernels

    def merged(self, linears: Sequence[Linear]) -> Linear:
        """See Products."""
        return SeparateLinears(linears)

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        """See Products."""
        return GatedLinear(SeparateLinears((gate, up)), activation, self._kernels)


def _merged_dense(linears: Sequence[nn.Linear]) -> Linear:
    weights = [linear.weight.detach() for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None
    if any(linear.bias is not None for linear in linears):
        zeros = [weight.new_zeros(linear.out_features) for linear in linears]
        pairs = zip(linears, zeros, strict=True)
        bias = torch.cat([zero if linear.bias is None else linear.bias.detach() for linear, zero in pairs])
    return PackedLinear(weight, bias) if can_prepack(weight.dtype) else DenseLinear(weight, bias)
