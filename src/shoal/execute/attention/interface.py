"""The function that `transformers` models call instead of their own attention.

It is registered under a name that has no mask builder, so models build no mask. It passes every call on to
the step object that was given to ``model.forward`` as a keyword, which computes the attention: paged, or
plain while a model is probed.
"""

from copy import copy
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutput

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


class Forward(Protocol):
    """Runs a model over the packed tokens of one step."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Logits [len(rows), vocab] of the tokens at ``rows``; input_ids and positions are [1, tokens]."""

    def hidden(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """What the output head would get for these tokens: [len(rows), hidden size], after the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of what ``hidden`` returned, or of some of its rows."""


class TransformersForward:
    """Runs a `transformers` model by its own ``forward``.

    The two halves of that, ``hidden`` and ``logits``, are run apart for tokens whose logits together would
    take too much memory.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """See Forward."""
        output = self._model(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=rows,
            **{STEP_KEYWORD: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def hidden(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """See Forward."""
        output = self._model.base_model(
            input_ids=input_ids, position_ids=positions, use_cache=False, **{STEP_KEYWORD: step}
        )
        hidden: torch.Tensor = output.last_hidden_state[0][rows]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Forward: the model's own ``forward`` around a base model that has its answer already.

        So whatever it does to the logits of its head, such as a softcap, is done here too.
        """
        model = copy(self._model)
        model._modules = {**model._modules, model.base_model_prefix: _Answered(hidden)}
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return logits


class _Answer(BaseModelOutput):  # type: ignore[misc]  # without types
    """The output of a base model. What else a model passes on of it, such as attentions, is None."""

    def __getattr__(self, name: str) -> None:
        """Nothing."""
        if name.startswith("__"):
            raise AttributeError(name)


class _Answered(torch.nn.Module):
    """Stands for a base model that has computed its hidden states [tokens, hidden size]."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._output = _Answer(last_hidden_state=hidden.unsqueeze(0))

    def forward(self, *arguments: Any, **keywords: Any) -> "_Answer":
        """The hidden states, whatever is asked."""
        del arguments, keywords
        return self._output

    @property
    def decoder(self) -> "_Answered":
        """Itself: some models ask this part of their base model."""
        return self


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
