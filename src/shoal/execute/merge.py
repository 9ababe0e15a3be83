"""Making one matrix product, as fast as this CPU can, of several that have the same input."""

from collections.abc import Sequence

import torch
from torch import nn

from shoal.execute.huge_pages import HugePages
from shoal.execute.int8_linear import Int8Linear
from shoal.execute.int8_weights import PANEL, Int8Weights
from shoal.execute.linear import DenseLinear, Linear, SeparateLinears
from shoal.execute.prepack import PackedLinear, can_prepack
from shoal.native import load_native


class Merger:
    """Merges layers as MergeLinears says: ``nn.Linear`` with each other, and Int8Linear with each other."""

    def __init__(self) -> None:
        self._memory = HugePages()

    def __call__(self, linears: Sequence[Linear]) -> Linear:
        """See MergeLinears."""
        dense = [linear for linear in linears if isinstance(linear, nn.Linear)]
        if len(dense) == len(linears):
            return _merged_dense(dense)
        int8 = [linear.weights for linear in linears if isinstance(linear, Int8Linear)]
        if len(linears) == 1:
            return linears[0]
        if len(int8) < len(linears) or not _are_panels(int8):
            return SeparateLinears(linears)
        return Int8Linear(_merged_int8(int8).moved(self._memory.put), load_native())


def _merged_dense(linears: Sequence[nn.Linear]) -> Linear:
    weights = [linear.weight.detach() for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([_or_zeros(linear.bias, linear.weight[:, 0]) for linear in linears])
    return PackedLinear(weight, bias) if can_prepack(weight.dtype) else DenseLinear(weight, bias)


def _are_panels(parts: Sequence[Int8Weights]) -> bool:
    """Whether all end where a panel ends, and have scales of the same kind."""
    return len({part.grouped for part in parts}) == 1 and all(p.out_features % PANEL == 0 for p in parts)


def _merged_int8(parts: Sequence[Int8Weights]) -> Int8Weights:
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([_or_zeros(part.bias, part.packed[:, 0, :, 0].float()) for part in parts])
    return Int8Weights(
        parts[0].in_features,
        sum(part.out_features for part in parts),
        torch.cat([part.packed for part in parts]),
        torch.cat([part.scales for part in parts]),
        bias,
    )


def _or_zeros(bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if bias is None else bias.detach()
