"""Times of tensor-parallel collectives in a step: all-reduces of hidden states, gathering of logits."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.forecast.model_spec import ModelSpec

_BYTES = 2
"""Size of one activation or logit."""


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds of tensor-parallel collectives (Shoeybi et al., Megatron-LM, section 3), as in vLLM.

    There are two all-reduces per layer, after attention and after the MLP or its experts, and one for the
    embedding, whose rows are split. The logits of sampled rows are gathered.
    """

    model: ModelSpec
    all_reduce_s: Callable[[float], float]
    """Seconds to sum a number of bytes over all devices; 0 on one device."""

    def layer_s(self, tokens: int) -> float:
        """Seconds of the two all-reduces of one layer."""
        return 2 * self.embedding_s(tokens)

    def embedding_s(self, tokens: int) -> float:
        """Seconds of one all-reduce of hidden states."""
        return self.all_reduce_s(_BYTES * tokens * self.model.hidden)

    def logits_s(self, sampled: int) -> float:
        """Seconds to gather logits; a gather sends each byte once, an all-reduce twice."""
        return self.all_reduce_s(_BYTES * sampled * self.model.vocab / 2) if sampled else 0.0
