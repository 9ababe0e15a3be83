"""The attention function that `transformers` models call instead of their own, and its AttentionStep.

The function is registered under a name that has no mask builder, so models build no mask. It passes each
call to the AttentionStep that was given to ``model.forward`` as a keyword: paged attention, or plain
attention while a model is probed.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from shoal.execute.attention.spec import AttentionSpec, PackedSpec

ATTENTION_NAME = "shoal"
STEP_KEYWORD = "shoal_step"


class AttentionStep(Protocol):
    """Computes the attention of one layer over the packed tokens of one step."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attention output [tokens, heads, value_dim].

        query [tokens, heads, key_dim], key [tokens, kv_heads, key_dim], value [tokens, kv_heads,
        value_dim]: new tokens of the step only.
        """

    def attend_packed(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spec: PackedSpec
    ) -> torch.Tensor:
        """Attention output [tokens, heads * value_dim] from the output of the merged QKV projection.

        qkv: [tokens, heads * key_dim + kv_heads * key_dim + kv_heads * value_dim]. cos, sin: [tokens, n],
        rotary factors of the first n elements of every query and key head; the other elements are not
        rotated.
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
        AttentionSpec(scaling, sliding_window or None, softcap, extra),
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
