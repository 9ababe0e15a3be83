"""Default size of the KV pool on a GPU: what is left beside weights, activations and CUDA graphs."""

from dataclasses import dataclass

CUDA_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that engines use. The rest is for CUDA itself and for what is not measured."""
GATHER_COPIES = 4
"""Copies of one layer's KV that a gathering decode needs: padded by at most 1 / 0.6, and held twice."""
MAX_GRAPH_ROWS = 256
"""Most rows that decode or sample in a step that is captured as a CUDA graph."""
MAX_GRAPH_TOKENS = 512
"""Most tokens of such a step."""
GRAPH_BYTES = 256 << 20
"""Memory of all CUDA graphs except logits: activations, inputs, and the driver's own data.

Counted once for all services: no two of their steps run concurrently, so their graphs share one memory pool
and one set of buffers. Only the driver's data grows with the number of graphs, by some MB each. A step whose
capture runs out of memory runs without a graph.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of an engine on its GPU beside the KV pool."""

    weight_bytes: int
    """Weights, which are already allocated."""
    step_bytes: int
    """Peak of the largest step."""
    graph_bytes: int
    """CUDA graphs."""
    gather_share: float
    """KV that decode steps gather, as a share of the pool."""


def graph_bytes(logits_bytes: int) -> int:
    """Memory of CUDA graphs; logits_bytes: of one row, in the model with the largest vocabulary.

    Logits are counted twice: the model's output, and the shared buffer that the sampler reads.
    """
    return GRAPH_BYTES + 2 * MAX_GRAPH_ROWS * logits_bytes


def pool_bytes(engine: EngineMemory, *, share: float, total: int, free: int) -> int:
    """Size of an engine's KV pool in bytes; 0 or less if there is no room.

    total, free: memory of the GPU. share: the engine's share of the total if several engines use the GPU, so
    that their sizes do not depend on the order in which they start. Other programs may use the GPU, too, so
    the pool is also limited by what is free.
    """
    planned = total * CUDA_MEMORY_SHARE * share - engine.weight_bytes
    left = free - total * (1 - CUDA_MEMORY_SHARE) * share
    beside = engine.step_bytes + engine.graph_bytes
    return int((min(planned, left) - beside) / (1 + engine.gather_share))
