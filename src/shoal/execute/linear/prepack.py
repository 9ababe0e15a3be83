"""Prepacking bf16 linear layers of a model, for our native kernel or for oneDNN."""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.execute.linear.bf16_linear import Bf16Packing
from shoal.execute.model.replacements import Replacements, children


class PackedLinear(nn.Module):
    """A linear layer with a weight prepacked by oneDNN; same result as ``nn.Linear``, 20-35% faster."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]; bypasses module hooks, which are not used here."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


GATE_ACTIVATIONS = (("swish", ""), ("gelu", "tanh"), ("gelu", "none"))


class PackedGatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with activation and product fused into the matrix products.

    activation: oneDNN's name and algorithm, one of GATE_ACTIVATIONS.
    """

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: tuple[str, str]
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.activation, self.algorithm = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] -> [..., hidden]."""
        linear = torch.ops.mkldnn._linear_pointwise
        gated = linear(x, self.gate.packed, self.gate.bias, self.activation, [], self.algorithm)
        return self.down(linear.binary(x, gated, self.up.packed, self.up.bias, "mul"))


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for prepacked weights of ``dtype`` on this machine."""
    return (
        dtype == torch.bfloat16
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def prepack(model: nn.Module, *, onednn: bool = True) -> Replacements:
    """Replace every plain bfloat16 linear layer of ``model`` by a packed one, if that is faster here.

    onednn: whether oneDNN may pack weights; else layers are left as they are where our kernel is not in use.
    """
    packing = Bf16Packing.for_this_cpu()
    replacements = Replacements()
    for parent, name, child in children(model):
        if type(child) not in (nn.Linear, Conv1D) or child.weight.dtype != torch.bfloat16:
            continue
        layer: Any = child
        weight = layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().T
        if packing is not None:
            replacements.put(parent, name, child, packing.pack(weight, layer.bias))
        elif onednn and can_prepack(weight.dtype):
            replacements.put(parent, name, child, PackedLinear(weight, layer.bias))
    return replacements
