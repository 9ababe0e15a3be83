"""Int8Product: products with int8 weights, by the native kernel or by torch operations with the same bits."""

from collections.abc import Sequence

import torch

from shoal.execute.linear.int8_reference import reference_product
from shoal.execute.linear.int8_weights import Int8Weights
from shoal.execute.linear.native_product import Activation, NativeProduct, output_features
from shoal.native import NativeLibrary


class Int8Product:
    """A NativeProduct of int8 weights; the input is quantised once for all parts.

    native: library of the kernel; None for torch operations, which compute the same bits slowly.
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
        self.out_features = output_features(parts, activation)
        self.native = (
            None if native is None else NativeProduct(native, "shoal_int8_product", parts, activation)
        )
        """The native product; None if torch computes it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.native is not None:
            return self.native(x)
        rows = x.reshape(-1, self.in_features)
        y = reference_product(self.parts, rows, self.activation.name)
        return y.view(*x.shape[:-1], self.out_features)
