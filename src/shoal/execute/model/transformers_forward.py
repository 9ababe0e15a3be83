"""The interface for running a model over the packed tokens of a step, and `transformers`' own forward."""

from copy import copy
from typing import Any, Protocol

import torch
from transformers.modeling_outputs import BaseModelOutput

from shoal.execute.attention.transformers_hook import STEP_KEYWORD, AttentionStep


class Forward(Protocol):
    """Runs a model over the packed tokens of one step; see ``TransformersForward`` and ``FusedForward``."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Logits [len(rows), vocab] of the tokens at ``rows``; input_ids and positions are [1, tokens]."""

    def hidden(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Inputs of the output head for the tokens at ``rows``: [len(rows), hidden size], after the last
        norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of rows of what ``hidden`` returned."""


class TransformersForward:
    """Runs a `transformers` model by its own ``forward``.

    ``hidden`` and ``logits`` run its two halves separately, for tokens whose logits would take too much
    memory at once.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
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
        output = self._model.base_model(
            input_ids=input_ids, position_ids=positions, use_cache=False, **{STEP_KEYWORD: step}
        )
        hidden: torch.Tensor = output.last_hidden_state[0][rows]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the model's own ``forward`` around a base model whose output is given.

        So everything that it does to the logits, such as a softcap, is done here, too.
        """
        model = copy(self._model)
        model._modules = {**model._modules, model.base_model_prefix: _ComputedBaseModel(hidden)}
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return logits


class _ComputedOutput(BaseModelOutput):  # type: ignore[misc]  # without types
    """The output of a base model. Its other attributes, such as ``attentions``, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _ComputedBaseModel(torch.nn.Module):
    """A base model whose output, hidden states [tokens, hidden size], is already computed."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._output = _ComputedOutput(last_hidden_state=hidden.unsqueeze(0))

    def forward(self, *arguments: Any, **keywords: Any) -> "_ComputedOutput":
        del arguments, keywords
        return self._output

    @property
    def decoder(self) -> "_ComputedBaseModel":
        """Itself: some models call this part of their base model."""
        return self
