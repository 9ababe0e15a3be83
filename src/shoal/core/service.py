"""A service: a named deployment of a model with its own traffic and goals."""

from dataclasses import dataclass, field

from shoal.core.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Latency goals of a service or of one request; None means no goal."""

    ttft_s: float | None = None
    """Time to first token."""
    tpot_s: float | None = None
    """Mean time per output token after the first."""
    e2e_s: float | None = None
    """Arrival to last token."""
    e2e_scale: float | None = None
    """Arrival to last token, as a multiple of the service's execution time (``Service.execution_s``)."""


NO_GOALS = SLO()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One named deployment. Two services may name one model; its weights are then loaded once."""

    name: str
    """The name by which requests choose it."""
    model: str
    """An alias, a Hugging Face folder, a hub id or a GGUF file."""
    dtype: str = "auto"
    """"auto", "float32", "bfloat16", "float16", or "int8": linear layers in int8 and everything else in
    bfloat16 (KV as ``kv_cache.dtype`` says); on CPUs only. "auto" is the dtype in which the weights are
    stored; for a quantised GGUF file int8 where the kernel for that is fast, else bfloat16."""
    max_model_len: int | None = None
    """Context limit in tokens; None takes the model's own."""
    chat_template: str | None = None
    """Jinja source that replaces the model's own template."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Sampling parameters of requests that leave them out."""
    slo: SLO = NO_GOALS
    """Goals of requests that have none of their own."""
    execution_s: float | None = None
    """Time that the mean request takes alone on this device: the fixed unit of normalised latency and of
    ``slo.e2e_scale`` (``shoal profile`` measures it)."""
    quota: int = 8
    """Consecutive decode steps that the service may take in a round of the round-robin order."""
    idle_after_s: float | None = None
    """It is unloaded when it had no request for so long, and loaded again by the next; None: never. Only
    servers look at it."""
