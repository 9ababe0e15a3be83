"""User options of the KV cache: memory, block size, dtype, layout, prefix caching, swap space."""

from dataclasses import dataclass

KV_DTYPES = ("auto", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheOptions:
    """Options of one device group's KV pool."""

    memory_bytes: int | None = None
    """Size of the pool; None: 2 GiB on a CPU, the memory left by weights and activations on CUDA."""
    block_size: int = 16
    """Tokens per block."""
    dtype: str = "auto"
    """Of keys and values: "auto" (the model's dtype) or "int8" (with scales, about half of the memory of
    bfloat16; on CPUs only)."""
    layout: str = "merged"
    """"merged" (equal merged blocks, shared by all models) or "split" (units of one layer and KV head, the
    baseline)."""
    prefix_caching: bool = True
    """Keep the KV of finished requests for later requests with the same prefix."""
    swap_bytes: int | None = None
    """Host memory for the KV of preempted requests, if the scheduler's ``preemption_mode`` is "swap".

    None: four times the pool, but at most a quarter of the host's free memory, and on CUDA, where it is
    pinned at the start, at most 4 GiB.
    """
