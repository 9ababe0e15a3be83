"""DecoderLayer: a fused decoder layer, with norms, residual sums and activations in kernels of our own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.execute.attention.spec import PackedSpec
from shoal.execute.attention.transformers_hook import AttentionStep
from shoal.execute.linear.merged_products import Linear, ProductBuilder
from shoal.execute.linear.native_product import Activation
from shoal.execute.model.record_attention import RecordedCall


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a decoder layer.

    Norms are RMS norms with float32 scales and one ``eps``:

        sum = x + after_attention(attention(before_attention(x)))
        output = sum + after_mlp(mlp(before_mlp(sum)))
    """

    attention: RecordedCall
    qkv: tuple[Linear, ...]
    o: Linear
    gate: Linear
    up: Linear
    """Projection that the activated gate scales."""
    down: Linear
    before_attention: torch.Tensor
    """Scale [hidden]."""
    after_attention: torch.Tensor | None
    """Scale [hidden]; None for no norm."""
    before_mlp: torch.Tensor
    """Scale [hidden]."""
    after_mlp: torch.Tensor | None
    """Scale [hidden]; None for no norm."""
    q_norm: torch.Tensor | None
    """Scale [key_dim] for each query head; None for no norm."""
    k_norm: torch.Tensor | None
    """Scale [key_dim] for each key head; None for no norm."""
    eps: float


@dataclass(frozen=True, slots=True)
class LayerStyle:
    """Properties of a layer that its weights do not show."""

    activation: Activation
    rotary_interleaved: bool
    """See PackedSpec."""


class DecoderLayer(nn.Module):
    """Replaces a decoder layer of a `transformers` model.

    products: builds its matrix products, and has the other kernels.
    """

    def __init__(self, parts: LayerParts, style: LayerStyle, products: ProductBuilder) -> None:
        super().__init__()
        self.qkv = products.merged(parts.qkv)
        self.o = products.merged((parts.o,))
        self.gated = products.gated(parts.gate, parts.up, style.activation)
        self.down = products.merged((parts.down,))
        self.before_attention, self.after_attention = parts.before_attention, parts.after_attention
        self.before_mlp, self.after_mlp = parts.before_mlp, parts.after_mlp
        self.eps = parts.eps
        self.layer = parts.attention.layer
        self.attention = PackedSpec(
            heads=parts.attention.heads,
            shape=parts.attention.shape,
            rotary_interleaved=style.rotary_interleaved,
            q_scale=parts.q_norm,
            k_scale=parts.k_norm,
            norm_eps=parts.eps,
            attention=parts.attention.spec,
        )
        self.kernels = products.kernels

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        shoal_step: AttentionStep,
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, hidden] -> [1, tokens, hidden]; bypasses module hooks, which are not
        used here."""
        x = hidden_states[0].contiguous()
        normed = self.kernels.norm(x, self.before_attention, self.eps)
        cos, sin = position_embeddings
        x, mlp_output = self.compute(x, normed, self.angles(cos), self.angles(sin), shoal_step)
        x, _normed = self.kernels.residual_norm(mlp_output, self.after_mlp, x, None, self.eps)
        return x.unsqueeze(0)

    def angles(self, table: torch.Tensor) -> torch.Tensor:
        """Cosines or sines [tokens, n] for attention, from [1, tokens, n] as `transformers` has them."""
        if not self.attention.rotary_interleaved:
            return table[0]
        return table[0, :, : table.shape[2] // 2].repeat_interleave(2, dim=1)

    def compute(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: AttentionStep,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after attention, and the MLP's output, which is not added yet.

        x: the layer's input [tokens, hidden]. normed: its norm before attention. cos, sin: from ``angles``.
        rows: indices of the tokens to return; None for all.
        """
        qkv = self.qkv(normed)
        attended = step.attend_packed(self.layer, qkv, cos, sin, self.attention)
        if rows is not None:
            x, attended = x[rows], attended[rows]
        x, normed = self.kernels.residual_norm(
            self.o(attended), self.after_attention, x, self.before_mlp, self.eps
        )
        return x, self.down(self.gated(normed))
