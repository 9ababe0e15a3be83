"""Linear layers with packed weights, ours and oneDNN's, and which are in use."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.execute.huge_pages import HugePages
from shoal.execute.linear.int8_reference import ReferenceProduct
from shoal.execute.linear.native_product import Activation, NativeProduct
from shoal.execute.linear.packed_weights import PackedWeights, pack_bf16
from shoal.native import NativeLibrary, load_native


class PackedLinear(nn.Module):
    """x [..., in_features], float32 or bfloat16, to [..., out_features] in the same dtype.

    native: library of the kernel; None for torch operations, which compute the same bits slowly, for int8
    weights only.
    """

    def __init__(self, weights: PackedWeights, native: NativeLibrary | None) -> None:
        super().__init__()
        self.weights = weights
        self.native = native
        self.in_features, self.out_features = weights.in_features, weights.out_features
        self._product = packed_product([weights], native)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Bypasses module hooks, which are not used here."""
        return self._product(x)


def packed_product(
    parts: Sequence[PackedWeights], native: NativeLibrary | None, activation: Activation = Activation.NONE
) -> NativeProduct | ReferenceProduct:
    """The product of these weights, as in NativeProduct; native: as in PackedLinear."""
    return ReferenceProduct(parts, activation) if native is None else NativeProduct(native, parts, activation)


def joint_product(
    layers: Sequence[object], activation: Activation = Activation.NONE
) -> NativeProduct | ReferenceProduct | None:
    """One product for layers with the same input, as in NativeProduct; None if they are not all PackedLinear
    of one format."""
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if len(packed) < len(layers) or len({layer.weights.bits for layer in packed}) > 1:
        return None
    return packed_product([layer.weights for layer in packed], packed[0].native, activation)


class OnednnLinear(nn.Module):
    """A linear layer with a weight packed by oneDNN; same result as ``nn.Linear``, 20-35% faster."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]; bypasses module hooks, which are not used here."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


class OnednnGatedProduct:
    """activation(gate(x)) * up(x), with activation and product fused into the matrix products."""

    def __init__(self, gate: OnednnLinear, up: OnednnLinear, activation: Activation) -> None:
        self.gate, self.up = gate, up
        self.activation, self.algorithm = _ONEDNN_ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        gated = linear(x, self.gate.packed, self.gate.bias, self.activation, [], self.algorithm)
        result: torch.Tensor = linear.binary(x, gated, self.up.packed, self.up.bias, "mul")
        return result


_ONEDNN_ACTIVATIONS = {
    Activation.SILU: ("swish", ""),
    Activation.GELU_TANH: ("gelu", "tanh"),
    Activation.GELU_ERF: ("gelu", "none"),
}
"""oneDNN's names and algorithms."""


class Bf16Packing:
    """Packs bfloat16 layers in the fastest format for this CPU.

    onednn: whether oneDNN may pack weights; else layers are left as they are where our kernel is not in use.
    """

    def __init__(self, *, onednn: bool = True) -> None:
        self.native = bf16_library()
        """Library of our kernel; None if that is not in use."""
        self._onednn = onednn and onednn_packs_bf16()
        self._memory = HugePages()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear | OnednnLinear | None:
        """A layer with weight [out, in] and bias [out]; None for other dtypes, or if torch is fastest."""
        if weight.dtype != torch.bfloat16:
            return None
        if self.native is not None:
            return PackedLinear(pack_bf16(weight, bias, self._memory), self.native)
        return OnednnLinear(weight, bias) if self._onednn else None


def bf16_library() -> NativeLibrary | None:
    """The library of our bfloat16 kernel; None without AVX2, where torch is faster."""
    native = load_native()
    return None if native is None or native.variant == "scalar" else native


def onednn_packs_bf16() -> bool:
    """Whether oneDNN has kernels for packed bfloat16 weights on this machine."""
    return bool(torch.backends.mkldnn.is_available()) and bool(  # type: ignore[no-untyped-call]
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def dense_weight(layer: Any) -> torch.Tensor | None:
    """The weight [out_features, in_features] of a plain dense layer; None for other modules."""
    if type(layer) not in (nn.Linear, Conv1D):
        return None
    weight: torch.Tensor = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.T
