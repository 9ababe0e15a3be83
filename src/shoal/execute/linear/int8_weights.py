"""int8 weights: quantisation per output channel or per group of 32 inputs, and packing for the kernel.

The packed layout is the same for all instruction sets: panels of 32 output channels, each with four inputs
of every channel, then the next four: ``[panels, inputs / 4, 32, 4]``. A weight is stored as weight + 128,
because the CPU's int8 dot products need one unsigned factor. Both dimensions are padded with zero weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

GROUP = 32
"""Number of inputs that share a scale."""
PANEL = 32
"""Number of output channels in a panel."""


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """The weights of a linear layer as the kernel reads them."""

    in_features: int
    out_features: int
    packed: torch.Tensor
    """uint8 [panels, inputs / 4, 32, 4], contiguous."""
    scales: torch.Tensor
    """float32 [panels, 32], one for each output channel, or [panels, groups, 32]."""
    bias: torch.Tensor | None
    """float32 [panels, 32]."""

    @property
    def grouped(self) -> bool:
        """Whether each group of inputs has a scale."""
        return self.scales.ndim == 3

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> "Int8Weights":
        """The same weights, with each tensor copied by ``copy``."""
        bias = None if self.bias is None else copy(self.bias)
        return replace(self, packed=copy(self.packed), scales=copy(self.scales), bias=bias)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.packed, self.scales, self.bias) if part is not None)


def quantise_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per output channel: weight [out, in] -> values int8 [out, in], scales float32 [out]."""
    weight = weight.float()
    largest = weight.abs().amax(dim=1)
    scales = largest / 127
    factors = torch.where(largest > 0, 127 / largest, 0)
    return (weight * factors[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def pack(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Weights:
    """Pack values int8 [out, in], scales float32 [out] or [out, groups], and bias [out]."""
    rows, columns = values.shape
    values = F.pad(values, (0, -columns % GROUP, 0, -rows % PANEL))
    words = (values.view(torch.uint8) ^ 128).view(torch.int32)  # four inputs each
    words = words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()
    scales = F.pad(scales.float(), (*(0, 0) * (scales.ndim - 1), 0, -rows % PANEL))
    scales = scales.view(-1, PANEL, *scales.shape[1:])
    if scales.ndim == 3:
        scales = scales.transpose(1, 2).contiguous()
    if bias is not None:
        bias = F.pad(bias.detach().float(), (0, -rows % PANEL)).view(-1, PANEL)
    return Int8Weights(columns, rows, words.view(torch.uint8).view(*words.shape, 4), scales, bias)


def unpack(weights: Int8Weights) -> torch.Tensor:
    """The padded values, int8 [panels * 32, groups * 32]."""
    words = weights.packed.view(torch.int32).squeeze(-1).transpose(1, 2).contiguous()
    return (words.view(-1, words.shape[2]).view(torch.uint8) ^ 128).view(torch.int8)
