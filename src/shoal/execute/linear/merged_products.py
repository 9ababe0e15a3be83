"""The products of fused layers: linear layers with the same input become one product, if they can."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from shoal.execute.cuda_graphs import empty_cuda_cache
from shoal.execute.linear.layer_kernels import Kernels, LayerKernels
from shoal.execute.linear.native_product import Activation
from shoal.execute.linear.packed_linear import Bf16Packing, joint_product
from shoal.native import load_native

_log = logging.getLogger(__name__)


class Linear(Protocol):
    """A linear layer of any weight format."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs]."""


class DenseLinear(nn.Module):
    """``nn.Linear`` that bypasses module hooks, which are not used here."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class SeparateLinears(nn.Module):
    """Several layers with the same input, computed one after the other, so that no weight is copied."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__()
        self.linears = tuple(linears)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


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


class ProductBuilder:
    """Builds the products of a fused layer. This one keeps layers separate and copies no weight, for trials.

    kernels: of norms and activations, for the products' device.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def merged(self, linears: Sequence[Linear]) -> Linear:
        """One product for layers with the same input; their outputs are concatenated."""
        return SeparateLinears(linears)

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        """activation(gate(x)) * up(x)."""
        return GatedLinear(self.merged((gate, up)), activation, self.kernels)


class FastProductBuilder(ProductBuilder):
    """Builds products in the fastest format for this CPU.

    Dense layers are merged by concatenating their weights, and packed layers without copies. onednn: whether
    oneDNN may pack weights.
    """

    def __init__(self, kernels: Kernels, *, onednn: bool = True) -> None:
        super().__init__(kernels)
        self._packing = Bf16Packing(onednn=onednn)

    def merged(self, linears: Sequence[Linear]) -> Linear:
        linears = [self._packed(linear) for linear in linears]
        if (product := joint_product(linears)) is not None:
            return product
        dense = [linear for linear in linears if isinstance(linear, nn.Linear)]
        if len(dense) != len(linears):
            return SeparateLinears(linears)
        weight, bias = _concatenated(dense)
        return self._packing.pack(weight, bias) or DenseLinear(weight, bias)

    def gated(self, gate: Linear, up: Linear, activation: Activation) -> Linear:
        gate, up = self._packed(gate), self._packed(up)
        return joint_product((gate, up), activation) or super().gated(gate, up, activation)

    def _packed(self, linear: Linear) -> Linear:
        """The layer packed for our kernel, if that is fastest; oneDNN packs merged weights instead."""
        if self._packing.native is None or not isinstance(linear, nn.Linear):
            return linear
        return self._packing.pack(linear.weight, linear.bias) or linear


class DenseProductBuilder(ProductBuilder):
    """Concatenates the weights of dense layers, without holding them twice.

    The layers' own weights become views of the merged weight, so the layers still compute the same.
    """

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


def choose_products(device: torch.device, *, onednn: bool = True) -> ProductBuilder | None:
    """Native ones on a CPU, Triton's on a GPU; None if the kernels are not installed or do not run.

    onednn: whether oneDNN may pack weights.
    """
    if device.type == "cpu":
        native = load_native()
        return None if native is None else FastProductBuilder(LayerKernels(native), onednn=onednn)
    if find_spec("triton") is None:
        return None
    # Importing it needs triton, which CPU builds of torch do not include.
    from shoal.execute.gpu.kernels import layer

    if (reason := layer.smoke_test(device)) is not None:
        _log.warning("Triton's kernels do not run here, so decoder layers are not fused: %s", reason)
        return None
    return DenseProductBuilder(layer.TritonLayerKernels())
