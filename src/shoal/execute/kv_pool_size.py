"""How large the KV pool of an engine on a GPU is, where the user does not say."""

from dataclasses import dataclass

CUDA_MEMORY_SHARE = 0.9
"""Of a GPU, what engines plan with. The rest is for CUDA itself, and for what is not measured."""
GATHER_COPIES = 4
"""A decode that gathers has keys and values of its rows in one layer: padded by at most 1 / 0.6, and held
twice."""
MOST_RECORDED_ROWS = 256
"""Decodes of more rows are not recorded."""
RECORDED_DECODES_BYTES = 128 << 20
"""Of all recorded decodes beside logits: activations, inputs, and what the driver keeps of graphs.

Once for all services: no two of their steps run side by side, so their graphs share one pool of memory and
one set of buffers. Only the driver's part grows with their number, by some MB for each graph. A recording for
which there is no memory is done without.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine has on its GPU beside the pool."""

    weight_bytes: int
    """Its weights, which are there already."""
    step_bytes: int
    """What its largest step takes for a while."""
    recorded_bytes: int
    """What its recorded decodes take."""
    gathers: float
    """What its decodes may gather, as a share of the pool."""


def recorded_bytes(logits_bytes: int) -> int:
    """What recorded decodes take; logits_bytes: of one row, in the model that has most.

    Its logits are there twice: as the model makes them, and where the sampler finds those of any graph.
    """
    return RECORDED_DECODES_BYTES + 2 * MOST_RECORDED_ROWS * logits_bytes


def pool_bytes(engine: EngineMemory, *, share: float, total: int, free: int) -> int:
    """Bytes for the pool of an engine; 0 or less if there is no room for one.

    total, free: bytes of the GPU, and those that nobody has at the moment. share: the engine's part of the
    total, where several share a GPU, so that what it gets does not depend on which start before it. Other
    programs may have some of the GPU, so the pool is also bounded by what is free.
    """
    planned = total * CUDA_MEMORY_SHARE * share - engine.weight_bytes
    left = free - total * (1 - CUDA_MEMORY_SHARE) * share
    beside = engine.step_bytes + engine.recorded_bytes
    return int((min(planned, left) - beside) / (1 + engine.gathers))
