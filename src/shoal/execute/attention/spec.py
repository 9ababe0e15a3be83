"""Settings of a layer's attention: AttentionSpec, and PackedSpec for a merged QKV projection's output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.kvcache import LayerShape


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer computes from queries, keys and values."""

    scaling: float | None = None
    """Factor on the scores; None for key_dim**-0.5."""
    window: int | None = None
    """Number of tokens that a token attends, including itself; None for all."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap); None for no cap."""
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Other keywords that the model passed. The probe checks them; backends do not read them."""

    def scale(self, key_dim: int) -> float:
        """Factor on the scores of keys with ``key_dim`` elements."""
        return key_dim**-0.5 if self.scaling is None else self.scaling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSpec:
    """What a layer computes from the output of its merged QKV projection."""

    heads: int
    """Query heads."""
    shape: LayerShape
    rotary_interleaved: bool
    """Whether element 2i is paired with 2i + 1; otherwise i with i + n / 2 of the n rotated elements."""
    q_scale: torch.Tensor | None
    """Scale of an RMS norm of every query head before the rotation, contiguous float32 [key_dim]; None for
    no norm."""
    k_scale: torch.Tensor | None
    """The same for key heads."""
    norm_eps: float
    attention: AttentionSpec
