"""What a loaded engine tells about itself: limits that a client can check requests against."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """Limits of one service.

    context_tokens: the model's limit (or the service's own). max_total_tokens: the most tokens,
    prompt and output together, that one request can have here; less than the context where the KV
    pool is small. kv_tokens: the most tokens that the KV pool could hold for this service alone.
    execution_s: as in ``Service``; without it no request can ask for an ``e2e_scale``.
    """

    model: str
    context_tokens: int
    max_total_tokens: int
    kv_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    execution_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """One engine after loading. kv_bytes: size of the KV pool; weight_bytes: of all weights."""

    services: Mapping[str, ServiceInfo]
    device: str
    threads: int
    block_size: int
    merged_blocks: int
    kv_bytes: int
    weight_bytes: int
