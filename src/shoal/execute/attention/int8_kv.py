"""Quantisation of keys and values to int8, with a scale for every 64 elements; native kernels do the same.

A scale belongs to a token and KV head, not to a block. A block is filled one token at a time, so a scale of
the block would have to grow with later tokens, and stored tokens would be rounded again. With scales per
token, blocks can be copied and shared as they are.
"""

import torch
import torch.nn.functional as F

from shoal.kvcache import SCALED, scales_of

LARGEST = 127
"""Largest integer; the smallest is its negative."""
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
"""Groups with a smaller scale are stored as zeros."""


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., dim] as int8 [..., dim] and bfloat16 scales [..., scales], whose product is nearly x.

    A scale is the bfloat16 nearest to the largest absolute element of its group / 127. Elements are rounded
    to the nearest multiple of it, ties to the even one. A group with an element that is not finite gets the
    scale NaN, which then appears in all results.
    """
    groups = _grouped(x.float())
    scale = (groups.abs().amax(-1) / LARGEST).to(torch.bfloat16)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    scale = torch.where(scale < SMALLEST_SCALE, 0, scale)
    usable = (scale > 0).unsqueeze(-1)
    quotients = groups / torch.where(usable, scale.float().unsqueeze(-1), 1)
    numbers = torch.where(usable, quotients.round(), 0).to(torch.int8)
    return numbers.flatten(-2)[..., : x.shape[-1]], scale


def dequantise(numbers: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """float32 [..., dim] of int8 [..., dim] and the bytes of their scales, int8 [..., scales, 2]."""
    scales = scale_bytes.contiguous().view(torch.bfloat16).float()
    return (_grouped(numbers.float()) * scales).flatten(-2)[..., : numbers.shape[-1]]


def as_bytes(scales: torch.Tensor) -> torch.Tensor:
    """int8 [..., scales, 2] of bfloat16 [..., scales]."""
    return scales.unsqueeze(-1).view(torch.int8)


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """x [..., dim] as [..., scales, SCALED], with zeros at the end."""
    *leading, dim = x.shape
    count = scales_of(dim)
    return F.pad(x, (0, count * SCALED - dim)).view(*leading, count, SCALED)
