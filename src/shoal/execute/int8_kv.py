"""Keys and values as int8, each with one scale; native kernels store the same.

A scale for each token and KV head, and not for each block: a block's tokens come one at a time, and a scale of
its own says all of one when it is written, so that nothing is rounded a second time and blocks stay what is copied,
shared and read by whoever comes later.
"""

import torch

LARGEST = 127
"""Of the integers; the smallest is its negative."""
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
"""Smaller numbers than those it belongs to are stored as zeros."""


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., dim] and scales, bfloat16 [...], of x [..., dim]: x is about their product.

    The scale is the bfloat16 that is nearest to the largest absolute number / 127, and numbers are rounded to
    the nearest multiple of it, ties to the even one. A row with a number that is not finite has scale NaN, so
    that it shows in all results.
    """
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).to(torch.bfloat16)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    scale = torch.where(scale < SMALLEST_SCALE, 0, scale)
    usable = (scale > 0).unsqueeze(-1)
    quotients = x / torch.where(usable, scale.float().unsqueeze(-1), 1)
    return torch.where(usable, quotients.round(), 0).to(torch.int8), scale


def dequantise(numbers: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """float32 [..., dim] of int8 [..., dim] and the bytes of their scales, int8 [..., 2]."""
    return numbers.float() * scale_bytes.contiguous().view(torch.bfloat16).float()
