"""Attention from the output of the merged QKV projection: query and key norms and rotary embeddings in torch.

Attention steps with native kernels compute these in the kernel instead.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from shoal.execute.attention.spec import PackedSpec

if TYPE_CHECKING:
    from shoal.execute.attention.transformers_hook import AttentionStep


class PackedQKV:
    """Implements ``attend_packed`` of an AttentionStep by its ``attend``."""

    def attend_packed(
        self: "AttentionStep",
        layer: int,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        spec: PackedSpec,
    ) -> torch.Tensor:
        tokens, heads, shape = len(qkv), spec.heads, spec.shape
        values = (heads + shape.kv_heads) * shape.key_dim
        rows = qkv[:, :values].view(tokens, heads + shape.kv_heads, shape.key_dim)
        query, key = rows[:, :heads], rows[:, heads:]
        if spec.q_scale is not None:
            query = _norm(query, spec.q_scale, spec.norm_eps)
        if spec.k_scale is not None:
            key = _norm(key, spec.k_scale, spec.norm_eps)
        out = self.attend(
            layer,
            _rotate(query, cos, sin, spec.rotary_interleaved),
            _rotate(key, cos, sin, spec.rotary_interleaved),
            qkv[:, values:].view(tokens, shape.kv_heads, shape.value_dim),
            spec.attention,
        )
        return out.reshape(tokens, heads * shape.value_dim)


def _norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), tuple(scale.shape), scale, eps).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, heads, dim] with its first n dimensions rotated by cos and sin [tokens, n]."""
    count = cos.shape[1]
    rotated, rest = x[..., :count].float(), x[..., count:]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-rotated[..., count // 2 :], rotated[..., : count // 2]), dim=-1)
    rotated = rotated * cos[:, None].float() + turned * sin[:, None].float()
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)
