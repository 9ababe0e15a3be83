"""Products with int8 weights: of one layer, of several with the same input, or of a gated pair."""

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch

from shoal.execute.int8_reference import reference_product
from shoal.execute.int8_weights import Int8Weights
from shoal.native import NativeLibrary

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class Activation(IntEnum):
    """Of a gate; numbers as in ``csrc/activation.h``."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU_ERF = 3


class Int8Product:
    """x [..., in_features] times the weights of all ``parts``, whose outputs stand side by side.

    The input is quantised once for all parts. With an activation there are two parts, a gate and a factor,
    and the output is activation(gate) * factor. native: whose kernel to use; None: torch operations that
    compute the same bits slowly.
    """

    def __init__(
        self,
        parts: Sequence[Int8Weights],
        native: NativeLibrary | None,
        activation: Activation = Activation.NONE,
    ) -> None:
        self.parts = tuple(parts)
        self.activation = activation
        self.in_features = parts[0].in_features
        """Columns of the input."""
        self.out_features = sum(part.out_features for part in parts[1 if activation else 0 :])
        """Columns of the output."""
        self._kernel = None if native is None else native.kernel("shoal_int8_product", *_PRODUCT, result=_INT)
        self._layers = (_Linear * len(parts))(*map(_linear, parts))
        self._product = _Product(
            ctypes.addressof(self._layers), len(parts), self.in_features, int(activation)
        )
        self._address = ctypes.addressof(self._product)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual + x W^T + bias [..., out_features], in the dtype of x, which is float32 or bfloat16.

        residual: [..., out_features] in the same dtype.
        """
        if self._kernel is None:
            return self._by_reference(x, residual)
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        added = None
        if residual is not None:
            residual = residual.contiguous()
            added = residual.data_ptr()
        rows = x.numel() // self.in_features
        if not self._kernel(self._address, x.data_ptr(), added, y.data_ptr(), rows, _IS_BF16[x.dtype]):
            raise MemoryError("no memory for the quantised inputs of a linear layer")
        return y

    def _by_reference(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        residual = None if residual is None else residual.reshape(-1, self.out_features)
        y = reference_product(self.parts, rows, residual, self.activation.name)
        return y.view(*x.shape[:-1], self.out_features)


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_PRODUCT = (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT)


class _Linear(ctypes.Structure):
    """``struct int8_linear`` of csrc/kernels/int8_linear.c."""

    _fields_ = (
        ("weights", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("columns", _INT),
        ("grouped", _INT),
    )


class _Product(ctypes.Structure):
    """``struct int8_product`` there."""

    _fields_ = (("parts", _POINTER), ("num_parts", _INT), ("inputs", _INT), ("activation", _INT))


def _linear(weights: Int8Weights) -> _Linear:
    bias = None if weights.bias is None else weights.bias.data_ptr()
    packed, scales = weights.packed.data_ptr(), weights.scales.data_ptr()
    return _Linear(packed, scales, bias, weights.out_features, weights.grouped)
