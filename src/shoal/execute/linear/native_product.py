"""NativeProduct: a matrix product by a native kernel, for one layer, merged layers or a gated pair.

A row's result has the same bits in any batch, chunking and number of threads. With int8 weights the input is
quantised in groups of 32, whose sums are exact integers and are added in order, so the bits are the same on
every instruction set, too, and with the same weights in four bits. bfloat16 weights are summed in float32; if
the CPU's bfloat16 dot products are no faster than float32, the kernel widens weights in registers.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from shoal.execute.linear.packed_weights import PackedWeights
from shoal.native import NativeLibrary

_KERNELS = {16: "shoal_bf16_product", 8: "shoal_int8_product", 4: "shoal_int4_product"}
"""By the bits of packed weights; in ``csrc/kernels``."""
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class Activation(IntEnum):
    """Activation of a gate; numbers as in ``csrc/activation.h``."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU_ERF = 3


GATE_ACTIVATIONS = tuple(Activation)[1:]


def output_features(parts: Sequence[PackedWeights], activation: Activation) -> int:
    """Outputs of a product; see NativeProduct."""
    return sum(part.out_features for part in parts[1 if activation else 0 :])


class NativeProduct:
    """x [..., in_features] times the weights of all ``parts``, with concatenated outputs.

    The input is prepared once for all parts, which have the same format. With an activation there are two
    parts, gate and factor, and the output is activation(gate) * factor.
    """

    def __init__(
        self,
        native: NativeLibrary,
        parts: Sequence[PackedWeights],
        activation: Activation = Activation.NONE,
    ) -> None:
        self.parts = tuple(parts)
        self._recipe = (native, self.parts, activation)
        self.in_features = parts[0].in_features
        self.out_features = output_features(parts, activation)
        kernel = _KERNELS[parts[0].bits]
        self._kernel = native.kernel(kernel, *_ARGUMENTS, result=_INT)
        self._layers = (_Linear * len(parts))(*map(_linear, parts))
        self._product = _Product(
            ctypes.addressof(self._layers), len(parts), self.in_features, int(activation)
        )
        self.address = ctypes.addressof(self._product)
        """Address of the ``struct product``, for native code."""
        self.function = native.address(kernel)
        """Address of the kernel, for native code."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without addresses, which are other ones in another process."""
        return type(self), self._recipe

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias [..., out_features], in the dtype of x, which is float32 or bfloat16."""
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        rows = x.numel() // self.in_features
        if not self._kernel(self.address, x.data_ptr(), y.data_ptr(), rows, _IS_BF16[x.dtype]):
            raise MemoryError("no memory for the inputs of a linear layer")
        return y


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_POINTER, _POINTER, _POINTER, _INT, _INT)


class _Linear(ctypes.Structure):
    """``struct linear`` of csrc/product.h."""

    _fields_ = (
        ("weights", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("columns", _INT),
        ("grouped", _INT),
    )


class _Product(ctypes.Structure):
    """``struct product`` of csrc/product.h."""

    _fields_ = (("parts", _POINTER), ("num_parts", _INT), ("inputs", _INT), ("activation", _INT))


def _linear(weights: PackedWeights) -> _Linear:
    scales, bias = (
        None if tensor is None else tensor.data_ptr() for tensor in (weights.scales, weights.bias)
    )
    return _Linear(weights.packed.data_ptr(), scales, bias, weights.out_features, weights.grouped)
