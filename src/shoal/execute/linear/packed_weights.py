"""PackedWeights: weights of linear layers as the native kernels read them, in bfloat16, int8 or four bits.

The layouts are the same for all instruction sets: panels of 32 output channels, each with two (int8: four)
inputs of every channel, then the next. Both dimensions are padded with zero weights. int8 weights are
quantised per output channel or per group of 32 inputs, and stored as weight + 128, because the CPU's int8 dot
products need one unsigned factor. int8 weights that are all in -8 to 7 can be packed in four bits each, as
weight + 8: a byte has an input of four in its lower half, and one of the next four in its upper half.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from shoal.execute.huge_pages import HugePages

GROUP = 32
"""Number of inputs that share a scale. Inputs are padded to a multiple of it."""
PANEL = 32
"""Number of output channels in a panel."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weights of a linear layer."""

    in_features: int
    """Without padding."""
    out_features: int
    """Without padding."""
    packed: torch.Tensor
    """bfloat16 [panels, inputs / 2, 32, 2], uint8 [panels, inputs / 4, 32, 4] for int8, or uint8 [panels,
    inputs / 8, 32, 4] for four bits; contiguous."""
    scales: torch.Tensor | None
    """For int8 and four bits: float32 [panels, 32], one for each output channel, or [panels, groups, 32]."""
    bias: torch.Tensor | None
    """float32 [panels, 32]."""

    @property
    def grouped(self) -> bool:
        """Whether each group of inputs has a scale."""
        return self.scales is not None and self.scales.ndim == 3

    @property
    def bits(self) -> int:
        """Of a weight: 16, 8 or 4."""
        return self.packed[0].nbytes * 8 // (PANEL * _padded(self.in_features))

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> "PackedWeights":
        """The same weights, with each tensor copied by ``copy``."""
        scales, bias = (None if part is None else copy(part) for part in (self.scales, self.bias))
        return replace(self, packed=copy(self.packed), scales=scales, bias=bias)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.packed, self.scales, self.bias) if part is not None)


def pack_bf16(weight: torch.Tensor, bias: torch.Tensor | None, memory: HugePages) -> PackedWeights:
    """Pack weight [out, in], bfloat16, into ``memory``, and bias [out]."""
    rows, columns = weight.shape
    padded = F.pad(weight.detach(), (0, -columns % GROUP, 0, -rows % PANEL))
    pairs = padded.contiguous().view(torch.int32).view(-1, PANEL, padded.shape[1] // 2).transpose(1, 2)
    packed = memory.put(pairs).view(torch.bfloat16).view(*pairs.shape, 2)
    return PackedWeights(columns, rows, packed, None, _bias_panels(bias))


def quantise_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per output channel: weight [out, in] -> values int8 [out, in], scales float32 [out]."""
    weight = weight.float()
    largest = weight.abs().amax(dim=1)
    scales = largest / 127
    factors = torch.where(largest > 0, 127 / largest, 0)
    return (weight * factors[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def pack_int8(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeights:
    """Pack values int8 [out, in], scales float32 [out] or [out, groups], and bias [out]."""
    rows, columns = values.shape
    values = F.pad(values, (0, -columns % GROUP, 0, -rows % PANEL))
    words = (values.view(torch.uint8) ^ 128).view(torch.int32)  # four inputs each
    words = words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()
    scales = F.pad(scales.float(), (*(0, 0) * (scales.ndim - 1), 0, -rows % PANEL))
    scales = scales.view(-1, PANEL, *scales.shape[1:])
    if scales.ndim == 3:
        scales = scales.transpose(1, 2).contiguous()
    packed = words.view(torch.uint8).view(*words.shape, 4)
    return PackedWeights(columns, rows, packed, scales, _bias_panels(bias))


def pack_integers(
    values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> PackedWeights:
    """``pack_int8``, but in four bits if all values are in -8 to 7: products are the same in either."""
    weights = pack_int8(values, scales, bias)
    if values.min() < -8 or values.max() > 7:
        return weights
    stored = weights.packed - 120  # from weight + 128 to weight + 8
    return replace(weights, packed=stored[:, ::2] | stored[:, 1::2] << 4)


def widened(weights: PackedWeights) -> PackedWeights:
    """Weights of four bits in int8; others as they are."""
    if weights.bits != 4:
        return weights
    values = torch.stack((weights.packed & 15, weights.packed >> 4), dim=2)
    return replace(weights, packed=values.flatten(1, 2) + 120)  # from weight + 8 to weight + 128


def unpack_int8(weights: PackedWeights) -> torch.Tensor:
    """The padded values of weights in int8 or four bits, int8 [panels * 32, groups * 32]."""
    words = widened(weights).packed.view(torch.int32).squeeze(-1).transpose(1, 2).contiguous()
    return (words.view(-1, words.shape[2]).view(torch.uint8) ^ 128).view(torch.int8)


def _padded(inputs: int) -> int:
    return inputs + -inputs % GROUP


def _bias_panels(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else F.pad(bias.detach().float(), (0, -len(bias) % PANEL)).view(-1, PANEL)
