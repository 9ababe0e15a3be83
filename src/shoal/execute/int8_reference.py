"""The int8 kernel in torch operations, bit for bit: for machines without the native library."""

import torch
import torch.nn.functional as F

from shoal.execute.int8_weights import GROUP, Int8Weights, unpack

SMALLEST = 2.0**-100
"""Groups whose largest magnitude is below this become 0."""


class Int8Reference:
    """The product with one layer's weights."""

    def __init__(self, weights: Int8Weights) -> None:
        self._weights = weights
        self._values = unpack(weights).view(-1, weights.packed.shape[1] * 4 // GROUP, GROUP)
        """int8 [columns, groups, 32]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features], float32 or bfloat16 -> [rows, out_features] in the same dtype."""
        weights = self._weights
        inputs, scales = quantise_rows(x)
        total = torch.zeros((len(x), len(self._values)))
        for group in range(self._values.shape[1]):
            # Exact, and so in any order: sums of 32 products of int8 are far below 2 ** 24.
            part = inputs[:, group] @ self._values[:, group].float().T
            if weights.grouped:
                part = part * weights.scales[:, group].reshape(-1)
            total = multiply_add(part, scales[:, group, None], total)
        if not weights.grouped:
            total = total * weights.scales.view(-1)
        if weights.bias is not None:
            total = total + weights.bias.view(-1)
        return total[:, : weights.out_features].to(x.dtype)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers in float32 [rows, groups, 32], and their scales [rows, groups].

    A group that is not finite gets the scale NaN, so that all outputs of its row become NaN.
    """
    x = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    largest = x.abs().amax(dim=2)
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST)
    factors = torch.full_like(largest, 127) / largest  # 127 / largest would multiply by a reciprocal
    rounded = (x * factors[..., None]).round()
    scales = torch.where(usable, largest / 127, torch.where(finite, 0.0, torch.nan))
    return torch.where(usable[..., None], rounded, 0.0), scales


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32, rounded once.

    In float64 the product is exact and the sum is rounded to odd (Boldo and Melquiond, 2008), after which
    rounding to float32 gives what a single rounding would have given.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    from_c = total - product
    error = (product - (total - from_c)) + (c - from_c)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)  # of the magnitude, which is what bits count
    odd = torch.where((error != 0) & (bits & 1 == 0), bits + away, bits)
    return odd.view(torch.float64).float()
