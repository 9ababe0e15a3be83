"""EngineInfo, ServiceInfo: limits and facts of a loaded engine, for clients to check requests against."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.length_limits import LengthLimits
from shoal.models import ModelDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    model: str
    context_tokens: int
    max_total_tokens: int
    """Maximum length of a request, prompt and output: less than the context if the pool is small."""
    kv_tokens: int
    """Tokens that the KV pool can hold for this service alone."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    execution_s: float | None = None
    """As in ``Service``; without it no request can have an ``e2e_scale``."""
    prefill_s: float = 0.0
    """Seconds per prompt token of a request that runs alone; 0: not measured."""
    decode_s: float = 0.0
    """Seconds per output token of a request that runs alone; 0: not measured."""
    kv_format: str = ""
    """KV can migrate between engines with equal values; empty: it cannot (see ``migration.kv_format``)."""
    dtype: str = ""
    """Data type of the computation, such as ``bfloat16`` or ``int8``; empty: not known."""
    weight_bytes: int = 0
    """Size of the weights in memory, which services of one model may share."""
    pinned: bool = False
    """Whether its weights never leave the device's memory."""
    simulated: bool = False
    """Whether no model computes its tokens."""
    described: ModelDescription | None = None
    """Description of the model for users; None: not known."""

    def lengths(self, service: str) -> LengthLimits:
        """The limits on the length of requests; service: its name."""
        return LengthLimits(service, self.context_tokens, self.max_total_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """One engine after loading."""

    services: Mapping[str, ServiceInfo]
    device: str
    threads: int
    block_size: int
    merged_blocks: int
    kv_bytes: int
    weight_bytes: int
    max_running: int | None = None
    """Maximum requests that hold KV at once; None: not limited by number."""
    takes_priorities: bool = False
    """Whether the scheduling order reads ``Request.priority``."""
    kernels: str = "torch only"
    """Kernels in use, as ``native_status`` returns them."""
    host: str = ""
    """Host name; empty: not known."""
