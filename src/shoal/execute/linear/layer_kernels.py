"""RMS norms with residual sums and gated activations on torch tensors: Kernels, and native LayerKernels."""

import ctypes
from typing import Any, Protocol

import torch

from shoal.execute.linear.native_product import Activation
from shoal.native import NativeLibrary

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


class Kernels(Protocol):
    """Norms and activations over contiguous tensors [rows, size].

    Computed in float32 and rounded once for each output tensor. A row's result does not depend on other
    rows.
    """

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Supported dtypes."""

    def norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * scale; scale float32 [size]."""

    def residual_norm(
        self,
        x: torch.Tensor,
        before: torch.Tensor | None,
        residual: torch.Tensor,
        after: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of residual and x, and its norm.

        before: scale of a norm of x before the sum; None for no norm. after: scale of the norm of the sum;
        None for no norm, then the sum is returned twice.
        """

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up; gate_up is [rows, 2 * size], gate and up concatenated."""


class LayerKernels:
    """The native Kernels, for CPUs; results have the same bits on every instruction set."""

    dtypes = tuple(_IS_BF16)

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._residual_norm = library.kernel(
            "shoal_residual_norm", *[pointer] * 6, size, size, ctypes.c_float, ctypes.c_int32
        )
        self._gated_activation = library.kernel(
            "shoal_gated_activation", pointer, pointer, size, size, ctypes.c_int32, ctypes.c_int32
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without addresses of functions."""
        return type(self), (self._library,)

    def norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._residual_norm(
            x.data_ptr(), None, None, None, scale.data_ptr(), out.data_ptr(), *x.shape, eps, _IS_BF16[x.dtype]
        )
        return out

    def residual_norm(
        self,
        x: torch.Tensor,
        before: torch.Tensor | None,
        residual: torch.Tensor,
        after: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty_like(x)
        out = total if after is None else torch.empty_like(x)
        self._residual_norm(
            x.data_ptr(),
            None if before is None else before.data_ptr(),
            residual.data_ptr(),
            total.data_ptr(),
            None if after is None else after.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
            _IS_BF16[x.dtype],
        )
        return total, out

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, both = gate_up.shape
        out = gate_up.new_empty((rows, both // 2))
        self._gated_activation(
            gate_up.data_ptr(), out.data_ptr(), rows, both // 2, activation, _IS_BF16[gate_up.dtype]
        )
        return out
