"""A service: a named deployment of a model with its own traffic and goals."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Latency goals of a service; None means no goal.

    ttft_s: time to first token. tpot_s: mean time per output token after the first. e2e_s: arrival
    to last token. All in seconds.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One named deployment. Two services may name one model; its weights are then loaded once.

    model: an alias, a Hugging Face folder, a hub id or a GGUF file.
    dtype: "auto" (the dtype the weights are stored in), "float32", "bfloat16" or "float16".
    max_model_len: context limit in tokens; None takes the model's own.
    chat_template: Jinja source that replaces the model's own template.
    """

    name: str
    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    chat_template: str | None = None
    slo: SLO = SLO()
