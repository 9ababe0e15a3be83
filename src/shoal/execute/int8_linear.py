"""Linear layers with int8 weights, whose inputs are quantised on the fly in groups of 32.

Every sum of a group is an exact integer, and groups are added in order: the result is the same bits on every
instruction set and for any batch, chunking and number of threads.
"""

import ctypes
from collections.abc import Callable
from typing import Self

import torch
from torch import nn

from shoal.execute.int8_reference import Int8Reference
from shoal.execute.int8_weights import Int8Weights, pack, quantise_channels
from shoal.native import NativeLibrary, load_native

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class Int8Linear(nn.Module):
    """x [..., in_features], float32 or bfloat16, to [..., out_features] in the same dtype.

    native: whose kernel to use; None: torch operations that compute the same bits slowly.
    """

    def __init__(self, weights: Int8Weights, native: NativeLibrary | None) -> None:
        super().__init__()
        self.weights = weights
        self.in_features = weights.in_features
        self.out_features = weights.out_features
        self._multiply = Int8Reference(weights) if native is None else _native_product(weights, native)

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, native: NativeLibrary | None = None
    ) -> Self:
        """From a dense weight [out_features, in_features], quantised per output channel."""
        return cls(pack(*quantise_channels(weight), bias), native or load_native())

    @classmethod
    def from_groups(
        cls,
        values: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        native: NativeLibrary | None = None,
    ) -> Self:
        """From values int8 [out_features, in_features] with scales float32 [out_features, groups of 32]."""
        return cls(pack(values, scales, bias), native or load_native())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class; without module hooks, which are not used here."""
        return self._multiply(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class _Arguments(ctypes.Structure):
    """``struct int8_linear`` of csrc/kernels/int8_linear.c."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("grouped", ctypes.c_int64),
    )


def _native_product(weights: Int8Weights, native: NativeLibrary) -> Callable[[torch.Tensor], torch.Tensor]:
    kernel = native.kernel(
        "shoal_int8_linear",
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        result=ctypes.c_int64,
    )
    arguments = _Arguments(
        weights.packed.data_ptr(),
        weights.scales.data_ptr(),
        None if weights.bias is None else weights.bias.data_ptr(),
        weights.in_features,
        weights.out_features,
        weights.grouped,
    )
    address = ctypes.addressof(arguments)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = x.new_empty((len(x), arguments.columns))
        if not kernel(address, x.data_ptr(), y.data_ptr(), len(x), _IS_BF16[x.dtype]):
            raise MemoryError("no memory for the quantised inputs of a linear layer")
        return y

    return multiply
