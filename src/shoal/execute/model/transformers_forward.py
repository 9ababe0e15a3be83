"""How a model is run over a step's packed tokens: the interface, and `transformers`' own forward."""

from copy import copy
from typing import Any, Protocol

import torch
from transformers.modeling_outputs import BaseModelOutput

from shoal.execute.attention.transformers_hook import STEP_KEYWORD, AttentionStep


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
