"""Prefix sharing: converts hashes of a trace's blocks to hashes of the engine's KV blocks."""

from shoal.core import derive_seed
from shoal.workload.rows import TraceRow


def block_hashes(row: TraceRow, block_size: int) -> tuple[int, ...]:
    """One hash for each full KV block of ``block_size`` tokens that the row's hashes cover.

    Two prompts have equal hashes up to the last KV block whose tokens are all in equal trace blocks, and
    different hashes after it; so ``block_size`` need not divide ``row.hash_tokens``. Hashes are of prefixes:
    they depend on everything before the block. Trace hashes count modulo 2**64.
    """
    size = row.hash_tokens
    covered = min(row.prompt_tokens, len(row.hashes) * size) // block_size
    hashes: list[int] = []
    prefix = 0
    for index, number in enumerate(row.hashes):
        # A KV block belongs to the trace block where it ends, so that ``prefix`` covers all its tokens.
        prefix = derive_seed(prefix, number)
        first = prefix >> 1
        ending = (index + 1) * size // block_size - index * size // block_size
        hashes.extend(range(first, first + ending))
    return tuple(hashes[:covered])
