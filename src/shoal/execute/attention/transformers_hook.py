"""The function that `transformers` models call instead of their own attention.

It is registered under a name that has no mask builder, so models build no mask. It passes every call on to
the step object that was given to ``model.forward`` as a keyword, which computes the attention: paged, or
plain while a model is probed.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

ATTENTION_NAME = "shoal"
STEP_KEYWORD = "shoal_step"


class AttentionStep(Protocol):
    """Computes the attention of one layer over the packed tokens of one step."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Attention output [tokens, heads, value_dim].

        query [tokens, heads, key_dim], key [tokens, kv_heads, key_dim], value [tokens, kv_heads,
        value_dim]: the step's new tokens only. scaling: factor on the scores, None for
        key_dim**-0.5. window: how many tokens a token attends, including itself; None for all.
        softcap: scores become softcap * tanh(scores / softcap). extra: further keywords from the
        model.
        """

    def attend_packed(
        self,
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
        """Attention output [tokens, heads * value_dim] from what the product for q, k and v has given.

        qkv: [tokens, heads * key_dim + kv_heads * key_dim + kv_heads * value_dim]. cos, sin: [tokens, n],
        factors of the first n elements of every head of queries and keys, which are rotated.
        rotary_interleaved: each with its neighbour; otherwise those of the first half with those of the
        second. q_scale, k_scale: float32 [key_dim], scales of a root-mean-square norm of every head before
        that; None: there is none. The rest is as in ``attend``.
        """


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    shoal_step: AttentionStep | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Adapter between the calling convention of `transformers` ([1, heads, tokens, dim]) and ours."""
    if shoal_step is None:
        raise RuntimeError(f"{type(module).__name__} did not pass its keyword arguments on to attention")
    output = shoal_step.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scaling,
        window=sliding_window or None,
        softcap=softcap,
        extra=extra,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
