"""Merging QKV and gate/up projections of fused layers into products."""

from collections.abc import Sequence

import torch
from torch import nn

from shoal.execute.cuda_graphs import empty_cuda_cache
from shoal.execute.linear.bf16_linear import Bf16Linear, Bf16Packing, bf16_product
from shoal.execute.linear.int8_linear import Int8Linear
from shoal.execute.linear.int8_product import Int8Product
from shoal.execute.linear.layers import DenseLinear, GatedLinear, Linear, SeparateLinears
from shoal.execute.linear.native_product import Activation
from shoal.execute.linear.prepack import PackedLinear, can_prepack
from shoal.execute.model.layer_kernels import Kernels


class FastProductBuilder:
    """Builds products in the fastest format for this CPU.

    Dense layers are merged by concatenating their weights, and packed layers without copies. onednn: whether
    oneDNN may pack weights.
    """

    def __init__(self, kernels: Kernels, *, onednn: bool = True) -> None:
        self.kernels = kernels
        self._onednn = onednn
        self._packing = Bf16Packing.for_this_cpu()

    def merged(self, linears: Sequence[Linear]) -> Linear:
        linears = [self._packed(linear) for linear in linears]
        int8 = [linear for linear in linears if isinstance(linear, Int8Linear)]
        bf16 = [linear for linear in linears if isinstance(linear, Bf16Linear)]
        dense = [linear for linear in linears if isinstance(linear, nn.Linear)]
        if len(int8) == len(linears):
            return Int8Product([linear.weights for linear in int8], int8[0].native)
        if len(bf16) == len(linears):
            return bf16_product([linear.weights for linear in bf16], bf16[0].native)
        if len(dense) != len(linears):
            return SeparateLinears(linears)
        weight, bias = _concatenated(dense)
        packs = self._onednn and can_prepack(weight.dtype)
        return PackedLinear(weight, bias) if packs else DenseLinear(weight, bias)

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        gate, up = self._packed(gate), self._packed(up)
        if isinstance(gate, Int8Linear) and isinstance(up, Int8Linear):
            return gate.gated(up, activation)
        if isinstance(gate, Bf16Linear) and isinstance(up, Bf16Linear):
            return gate.gated(up, activation)
        return GatedLinear(self.merged((gate, up)), activation, self.kernels)

    def _packed(self, linear: Linear) -> Linear:
        """The layer packed for our kernel, if that is fastest; else the layer itself."""
        if (
            self._packing is None
            or not isinstance(linear, nn.Linear)
            or linear.weight.dtype != torch.bfloat16
        ):
            return linear
        return self._packing.pack(linear.weight, linear.bias)


class DenseProductBuilder:
    """Concatenates the weights of dense layers, without holding them twice.

    The layers' own weights become views of the merged weight, so the layers still compute the same.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def merged(self, linears: Sequence[Linear]) -> Linear:
        dense = [linear for linear in linears if isinstance(linear, nn.Linear)]
        if len(dense) != len(linears):
            return SeparateLinears(linears)
        weight, bias = _concatenated(dense)
        parts = torch.split(weight, [linear.out_features for linear in dense])
        for linear, part in zip(dense, parts, strict=True):
            linear.weight.data = part
        if weight.is_cuda and len(dense) > 1:
            # What the parts freed is in pieces too small for the next merged weight.
            empty_cuda_cache()
        return DenseLinear(weight, bias)

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        return GatedLinear(self.merged((gate, up)), activation, self.kernels)


class SeparateProductBuilder:
    """Keeps layers separate and copies no weight; for trials of a fused layer."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def merged(self, linears: Sequence[Linear]) -> Linear:
        return SeparateLinears(linears)

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        return GatedLinear(SeparateLinears((gate, up)), activation, self.kernels)


def _concatenated(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of all ``linears``; of a single one they are not copied."""
    weights = [linear.weight.detach() for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None
    if any(linear.bias is not None for linear in linears):
        zeros = [weight.new_zeros(linear.out_features) for linear in linears]
        pairs = zip(linears, zeros, strict=True)
        bias = torch.cat([zero if linear.bias is None else linear.bias.detach() for linear, zero in pairs])
    return weight, bias
