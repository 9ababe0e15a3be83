"""How large the KV pool of an engine on a GPU is, where the user does not say."""

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


def recorded_bytes(logits_bytes: int) -> int:
    """What recorded decodes take; logits_bytes: of one row, in the model that has most.

    Its logits are there twice: as the model makes them, and where the sampler finds those of any graph.
    """
    return RECORDED_DECODES_BYTES + 2 * MOST_RECORDED_ROWS * logits_bytes
