"""Packed linear layers for tests."""

import torch

from shoal.execute.linear.packed_linear import PackedLinear
from shoal.execute.linear.packed_weights import pack_int8, quantise_channels
from shoal.native import load_native


def quantised_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """In int8, from a dense weight [out_features, in_features] that is quantised per output channel."""
    return PackedLinear(pack_int8(*quantise_channels(weight), bias), load_native())
