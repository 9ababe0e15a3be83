"""ServiceLimits: limits of a service in the scheduler; the longest request that its KV pool can hold."""

from dataclasses import dataclass

from shoal.core import NO_GOALS, SLO
from shoal.kvcache import BlockPool


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of a service's model, and options of the service.

    context_tokens: context length of the model. slo, execution_s, quota, starvation_s: as in ``Service``.
    weights: equal for services that share weights; None: it has its own. weight_bytes: size of its weights.
    pinned: they never leave the device.
    """

    context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    slo: SLO = NO_GOALS
    execution_s: float | None = None
    quota: int = 8
    starvation_s: float | None = None
    weights: str | None = None
    weight_bytes: int = 0
    pinned: bool = False


def max_total_tokens(pool: BlockPool, service: str, limits: ServiceLimits) -> int:
    """Limit on the length of a request, prompt and output, by the model's context and the KV cache."""
    return min(limits.context_tokens, pool.max_blocks(service) * pool.block_size)
