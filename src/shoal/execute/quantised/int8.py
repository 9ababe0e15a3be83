"""Weights of int8 layers as a checkpoint has them, without a second rounding."""

from typing import Any

import torch

from shoal.execute.linear.packed_weights import GROUP
from shoal.execute.quantised.matrix import QuantisedMatrix

_ROWS = 1024
"""Rows that are compared at a time."""


def kept_integers(part: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and scales, as in ``QuantisedMatrix.in_int8``, of a layer that was loaded as ``weight``.

    part: what the checkpoint has under the layer's name; None if nothing. None if it is not quantised, cannot
    be int8 as it is, or does not give ``weight``, since transformers may order rows in another way.
    """
    found = part.in_int8() if isinstance(part, QuantisedMatrix) else None
    if found is None or found[0].shape != weight.shape:
        return None
    values, scales = found
    for rows in (slice(at, at + _ROWS) for at in range(0, len(values), _ROWS)):
        if not torch.equal(_product(values[rows], scales[rows]).to(weight.dtype), weight[rows]):
            return None
    return values, scales


def _product(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dense weights in float32."""
    inputs = values.shape[1]
    if scales.ndim == 1:
        return values * scales[:, None]
    return values * scales.repeat_interleave(GROUP, 1)[:, :inputs]
