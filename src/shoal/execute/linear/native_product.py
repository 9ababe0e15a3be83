"""NativeProduct: a matrix product by a native kernel, for one layer, merged layers or a gated pair."""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch

from shoal.native import NativeLibrary

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class Activation(IntEnum):
    """Activation of a gate; numbers as in ``csrc/activation.h``."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU_ERF = 3


class NativeWeights(Protocol):
    """The packed weights of a linear layer, as a kernel reads them."""

    @property
    def in_features(self) -> int:
        """Without padding."""

    @property
    def out_features(self) -> int:
        """Without padding."""

    @property
    def packed(self) -> torch.Tensor:
        """Panels of 32 output channels, in the layout of the kernel; contiguous."""

    @property
    def scales(self) -> torch.Tensor | None:
        """float32 [panels, 32], one for each output channel, or [panels, groups, 32]; None for no scales."""

    @property
    def bias(self) -> torch.Tensor | None:
        """float32 [panels, 32]."""

    @property
    def grouped(self) -> bool:
        """Whether each group of inputs has a scale."""


def output_features(parts: Sequence[NativeWeights], activation: Activation) -> int:
    return sum(part.out_features for part in parts[1 if activation else 0 :])


class NativeProduct:
    """x [..., in_features] times the weights of all ``parts``, with concatenated outputs.

    The input is prepared once for all parts. With an activation there are two parts, gate and factor, and the
    output is activation(gate) * factor. kernel: its name in ``csrc/kernels``.
    """

    def __init__(
        self,
        native: NativeLibrary,
        kernel: str,
        parts: Sequence[NativeWeights],
        activation: Activation = Activation.NONE,
    ) -> None:
        self.parts = tuple(parts)
        self._recipe = (native, kernel, self.parts, activation)
        self.in_features = parts[0].in_features
        self.out_features = output_features(parts, activation)
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


def _linear(weights: NativeWeights) -> _Linear:
    scales, bias = (
        None if tensor is None else tensor.data_ptr() for tensor in (weights.scales, weights.bias)
    )
    return _Linear(weights.packed.data_ptr(), scales, bias, weights.out_features, weights.grouped)
