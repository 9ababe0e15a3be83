"""Service: a named deployment of a model, with its SLO, sampling defaults and weights."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from shoal.core.sampling import SamplingDefaults

Weights = Literal["files", "random"]
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Latency goals of a service or of one request; None: no goal."""

    ttft_s: float | None = None
    """Time to first token."""
    tpot_s: float | None = None
    """Mean time per output token after the first."""
    mtpot_s: float | None = None
    """Largest inter-token latency."""
    e2e_s: float | None = None
    """Arrival to last token."""
    e2e_scale: float | None = None
    """Arrival to last token, as a multiple of the service's execution time (``Service.execution_s``)."""


NO_GOALS = SLO()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A named deployment. Two services may use one model; its weights are then loaded once."""

    name: str
    """The ``model`` of API requests."""
    model: str
    """An alias, a Hugging Face folder, a hub id or a GGUF file."""
    dtype: str = "auto"
    """"auto", "float32", "bfloat16", "float16", or "int8": linear layers in int8 and everything else in
    bfloat16 (KV as ``kv_cache.dtype`` says); on CPUs only. "auto" is the dtype in which the weights are
    stored; for quantised integers (of GGUF files and folders) int8 where the kernel for that is fast."""
    weights: Weights = "files"
    """"files": those of the model's files. "random": generated on the device from config.json alone, so that
    the speed of a model can be measured without its files."""
    weights_seed: int = 0
    """For random weights: the same seed gives the same weights, on the same kind of device."""
    max_model_len: int | None = None
    """Context limit in tokens; None: the model's."""
    chat_template: str | None = None
    """Jinja source that replaces the model's own template."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """For parameters that a request leaves out."""
    slo: SLO = NO_GOALS
    """For goals that a request leaves out."""
    execution_s: float | None = None
    """Time that the mean request takes alone on this device: the fixed unit of normalised latency and of
    ``slo.e2e_scale`` (measured by ``shoal profile``)."""
    quota: int = 8
    """Consecutive decode steps of the service in a round of the round-robin order."""
    starvation_s: float | None = None
    """Time without a step after which its requests go first; None: ``SchedulerOptions.starvation_s``."""
    idle_after_s: float | None = None
    """Time without a request after which it is unloaded; the next request loads it again. None: never. Used
    only by servers."""
    pace: bool = False
    """Whether streams pass on tokens that come in bursts one after another, ``slo.tpot_s`` apart. Used only
    by servers."""
    pin: bool = False
    """Whether its weights always stay in the device's memory; else they may leave for those of other
    services where ``weights.memory`` holds not all."""

    @property
    def random_seed(self) -> int | None:
        """The seed of random weights; None for weights from files."""
        return self.weights_seed if self.weights == "random" else None


def service_problem(service: Service) -> tuple[str, str] | None:
    """(key, problem) if options of ``service`` are invalid or contradict each other, else None."""
    if service.pace and service.slo.tpot_s is None:
        return "pace", "needs the time between two tokens of a stream: write slo.tpot, or leave pace out"
    if service.weights not in get_args(Weights):
        return "weights", f"must be one of {', '.join(get_args(Weights))}, got {service.weights!r}"
    if not 0 <= service.weights_seed <= LARGEST_SEED:
        return "weights_seed", f"must be at least 0 and at most {LARGEST_SEED}, got {service.weights_seed}"
    if service.weights_seed and service.random_seed is None:
        return "weights_seed", "is of random weights only: write weights: random, or leave the seed out"
    return None
