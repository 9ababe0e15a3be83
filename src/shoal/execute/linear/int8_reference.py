"""ReferenceProduct: the int8 kernel in torch operations, bit for bit, for use without the native library."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from shoal.execute.linear.native_product import Activation, output_features
from shoal.execute.linear.packed_weights import GROUP, PackedWeights, unpack_int8

SMALLEST = 2.0**-100
"""Groups whose largest magnitude is below this become 0."""


class ReferenceProduct:
    """A NativeProduct of int8 weights in torch operations, which compute the same bits slowly."""

    def __init__(self, parts: Sequence[PackedWeights], activation: Activation = Activation.NONE) -> None:
        self.parts = tuple(parts)
        self.activation = activation
        self.in_features = parts[0].in_features
        self.out_features = output_features(parts, activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inputs, scales = quantise_rows(x.reshape(-1, self.in_features))
        outputs = [_multiply(part, inputs, scales) for part in self.parts]
        if self.activation:
            gate, factor = outputs
            outputs = [ACTIVATIONS[self.activation](gate) * factor]
        return torch.cat(outputs, dim=1).to(x.dtype).view(*x.shape[:-1], self.out_features)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised x as integers in float32 [rows, groups, 32], and their scales [rows, groups].

    A group that is not finite gets the scale NaN, so that all outputs of its row are NaN.
    """
    x = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    largest = x.abs().amax(dim=2)
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST)
    factors = torch.full_like(largest, 127) / largest  # 127 / largest would multiply by a reciprocal
    rounded = (x * factors[..., None]).round()
    scales = torch.where(usable, largest * (1 / 127), torch.where(finite, 0.0, torch.nan))
    return torch.where(usable[..., None], rounded, 0.0), scales


def _multiply(weights: PackedWeights, inputs: torch.Tensor, input_scales: torch.Tensor) -> torch.Tensor:
    """[rows, out_features] in float32."""
    assert weights.scales is not None
    rows, groups = input_scales.shape
    values = unpack_int8(weights).view(-1, groups, GROUP)
    total = torch.zeros((rows, len(values)))
    for group in range(groups):
        # Exact in any order: sums of 32 products of int8 are far below 2 ** 24.
        part = inputs[:, group] @ values[:, group].float().T
        if weights.grouped:
            part = part * weights.scales[:, group].reshape(-1)
        total = multiply_add(part, input_scales[:, group, None], total)
    if not weights.grouped:
        total = total * weights.scales.view(-1)
    if weights.bias is not None:
        total = total + weights.bias.view(-1)
    return total[:, : weights.out_features]


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32, rounded once.

    In float64 the product is exact and the sum is rounded to odd (Boldo and Melquiond, 2008), after which
    rounding to float32 gives the result of a single rounding.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    from_c = total - product
    error = (product - (total - from_c)) + (c - from_c)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)  # away from zero, as the bits count the magnitude
    odd = torch.where((error != 0) & (bits & 1 == 0), bits + away, bits)
    return odd.view(torch.float64).float()


def exponential(x: torch.Tensor) -> torch.Tensor:
    """e^x as in ``csrc/activation.h``."""
    x = x.clamp(-87, 87)
    n = x * 1.44269504 + 12582912.0 - 12582912.0
    x = x - n * 0.693359375
    x = x - n * -2.12194440e-4
    p = torch.full_like(x, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * x + coefficient
    p = p * x
    p = p * x + x + 1.0
    return torch.ldexp(p, n)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (exponential(-x) + 1.0)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return x / (exponential((x + x * x * x * 0.044715) * -1.59576912) + 1.0)


def _gelu_erf(x: torch.Tensor) -> torch.Tensor:
    z = x.abs() * 0.707106781
    t = torch.ones_like(z) / (z * 0.3275911 + 1.0)
    p = torch.full_like(t, 1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = p * t + coefficient
    tail = p * t * exponential(-(z * z)) * 0.5
    return x * torch.where(x < 0, tail, 1.0 - tail)


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: _silu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.GELU_ERF: _gelu_erf,
}
"""As in ``csrc/activation.h``."""
