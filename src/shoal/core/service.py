"""A service: a named deployment of a model with its own traffic and goals."""

from dataclasses import dataclass, field

from shoal.core.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Latency goals of a service or of one request; None means no goal.

    ttft_s: time to first token. tpot_s: mean time per output token after the first. e2e_s: arrival
    to last token. All in seconds. e2e_scale: arrival to last token as a multiple of the service's
    execution time (``Service.execution_s``).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    e2e_scale: float | None = None


NO_GOALS = SLO()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One named deployment. Two services may name one model; its weights are then loaded once.

    model: an alias, a Hugging Face folder, a hub id or a GGUF file.
    dtype: "auto" (the dtype the weights are stored in), "float32", "bfloat16" or "float16".
    max_model_len: context limit in tokens; None takes the model's own.
    chat_template: Jinja source that replaces the model's own template.
    sampling: what its requests take where they leave a sampling parameter out.
    execution_s: how long the mean request takes alone on this device, in seconds: the fixed yardstick of
        normalised latency and of ``slo.e2e_scale`` (``shoal profile`` measures it).
    quota: consecutive decode steps that the service may take in a round of the round-robin order.
    """

    name: str
    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    chat_template: str | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    slo: SLO = NO_GOALS
    execution_s: float | None = None
    quota: int = 8
