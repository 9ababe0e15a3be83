"""Attention straight from the output of one product for queries, keys and values.

What lies between that product and attention (norms of queries and keys, rotary embeddings) is written out
here in torch operations, for every step; steps with kernels of their own compute it there.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from shoal.execute.attention.transformers_hook import AttentionStep


class PackedQKV:
    """Gives an AttentionStep ``attend_packed``."""

    def attend_packed(
        self: "AttentionStep",
        layer: int,
        qkv: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotary_interleaved: bool,
        q_scale: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        norm_eps: float,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See AttentionStep."""
        tokens, values = len(qkv), (heads + kv_heads) * key_dim
        rows = qkv[:, :values].view(tokens, heads + kv_heads, key_dim)
        query, key = rows[:, :heads], rows[:, heads:]
        if q_scale is not None:
            query = _norm(query, q_scale, norm_eps)
        if k_scale is not None:
            key = _norm(key, k_scale, norm_eps)
        out = self.attend(
            layer,
            _rotate(query, cos, sin, rotary_interleaved),
            _rotate(key, cos, sin, rotary_interleaved),
            qkv[:, values:].view(tokens, kv_heads, value_dim),
            scaling=scaling,
            window=window,
            softcap=softcap,
            extra={},
        )
        return out.reshape(tokens, heads * value_dim)


def _norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), tuple(scale.shape), scale, eps).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, heads, dim] with its first dimensions rotated, as many as cos and sin [tokens, n] have."""
    count = cos.shape[1]
    rotated, rest = x[..., :count].float(), x[..., count:]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-rotated[..., count // 2 :], rotated[..., : count // 2]), dim=-1)
    rotated = rotated * cos[:, None].float() + turned * sin[:, None].float()
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)
