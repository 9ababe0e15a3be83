"""What the devices that share a model exchange in a step."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.forecast.model_spec import ModelSpec

_BYTES = 2
"""Of one activation or logit."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Seconds of the exchanges of tensor parallelism (Shoeybi et al., Megatron-LM, section 3), as in vLLM.

    Every device has a part of each result, and the parts are summed: twice in a layer, after attention and
    after the MLP or its experts, and once for the embedding, whose rows are divided. The logits of sampled
    rows are gathered.
    """

    model: ModelSpec
    """The model that is shared."""
    reduce: Callable[[float], float]
    """Seconds to sum so many bytes over all devices, which is 0 on one device."""

    def layer_s(self, tokens: int) -> float:
        """Seconds to sum the hidden states of so many tokens after the two parts of one layer."""
        return 2 * self.embedding_s(tokens)

    def embedding_s(self, tokens: int) -> float:
        """Seconds to sum the hidden states of so many tokens once."""
        return self.reduce(_BYTES * tokens * self.model.hidden)

    def logits_s(self, sampled: int) -> float:
        """Seconds to gather the logits of so many rows, which are sent once; what is summed is sent twice."""
        return self.reduce(_BYTES * sampled * self.model.vocab / 2) if sampled else 0.0
