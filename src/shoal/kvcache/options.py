"""What a user can choose about the KV pool."""

from dataclasses import dataclass

KV_DTYPES = ("auto", "int8")
"""What keys and values may be stored as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheOptions:
    """Options of one device group's KV pool."""

    memory_bytes: int | None = None
    """Size of the pool; None lets the engine decide (2 GiB on a CPU, what is left after weights and
    activations on CUDA)."""
    block_size: int = 16
    """Tokens per block."""
    dtype: str = "auto"
    """What keys and values are stored as: "auto" (the model's dtype) or "int8" (with scales, in about half of
    the memory that bfloat16 takes; on CPUs only)."""
    layout: str = "merged"
    """How blocks lie in memory: "merged" (one slab of equal merged blocks for all models) or "split" (one
    block per layer and KV head, the baseline)."""
    prefix_caching: bool = True
    """Keep the KV of finished requests for later ones that start with the same tokens."""
    swap_bytes: int | None = None
    """Host memory for the KV of preempted requests, where the scheduler's ``preemption_mode`` is "swap".

    None takes four times the pool, at most a quarter of what the host has free, and on CUDA, where it is
    pinned as a whole at the start, at most 4 GiB.
    """
