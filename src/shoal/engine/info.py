"""What a loaded engine says about itself: limits that a client can check requests against."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.models import ModelDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """Limits of one service."""

    model: str
    """Its model, as configured."""
    context_tokens: int
    """The model's context limit, or the service's own."""
    max_total_tokens: int
    """Most tokens of one request, prompt and output together: less than the context if the pool is small."""
    kv_tokens: int
    """Most tokens that the KV pool could hold for this service alone."""
    vocab_size: int
    """Size of the model's vocabulary."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens."""
    execution_s: float | None = None
    """As in ``Service``; without it no request can have an ``e2e_scale``."""
    prefill_s: float = 0.0
    """Seconds that a request that runs alone takes for each token of its prompt; 0: not measured."""
    decode_s: float = 0.0
    """The same for each token of its output."""
    kv_format: str = ""
    """KV can move between engines where this is the same; empty: it cannot move (see ``kv_format``)."""
    dtype: str = ""
    """What its model is computed in, such as ``bfloat16`` or ``int8``; empty: not known."""
    weight_bytes: int = 0
    """Size of its model's weights in the memory of an engine; services of one model may share them."""
    described: ModelDescription | None = None
    """What people are told of its model; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """One engine after loading."""

    services: Mapping[str, ServiceInfo]
    """Its services by name."""
    device: str
    """The device that it runs on."""
    threads: int
    """CPU threads."""
    block_size: int
    """Tokens in a KV block."""
    merged_blocks: int
    """Merged blocks in the KV pool."""
    kv_bytes: int
    """Size of the KV pool."""
    weight_bytes: int
    """Size of all weights."""
    max_running: int | None = None
    """Most requests that hold KV at once; None where batches have sizes of their own."""
    takes_priorities: bool = False
    """Whether the order of the scheduler looks at ``Request.priority``."""
    kernels: str = "torch only"
    """What computes on the device, as ``native_status`` says it."""
    host: str = ""
    """The name of the machine that it runs on; empty: not known."""
