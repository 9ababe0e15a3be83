"""WeightsOptions: the memory for weights on a device, and how it is shared among more weights than fit."""

from dataclasses import dataclass, field

from shoal.core import ConfigError
from shoal.schedule.policies.admissions import Admission
from shoal.schedule.policies.residency import ResidencyPolicy, TurnsResidency

DEFAULT_BANDWIDTH = 2e9
"""Assumed bytes per second of a fetch before one was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOptions:
    """Options of one engine's weights.

    Services whose weights are not in the device's memory wait until they are fetched. Their running requests
    keep their KV, but give way where others need the memory.
    """

    memory_bytes: int | None = None
    """Limit on the bytes of weights in the device's memory; None: no limit, so all weights stay there."""
    policy: ResidencyPolicy = field(default_factory=TurnsResidency)
    """Which weights are fetched, and which leave for them."""
    quantum_s: float = 1.0
    """Weights that came stay at least until all requests there had a step, but at most this long."""
    max_absence_s: float = 10.0
    """Bound on the time between two tokens of a stream whose weights left; a round of all weights with
    requests may take longer."""
    bandwidth: float | None = None
    """Limit on the bytes per second of a fetch, to imitate slower devices; None: no limit."""

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers out of range."""
        for name in ("memory_bytes", "quantum_s", "max_absence_s", "bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                key = name.removesuffix("_s").removesuffix("_bytes")
                raise ConfigError(f"weights {key} must be above 0, got {value}")

    @property
    def assumed_bandwidth(self) -> float:
        """Bytes per second of a fetch before one was measured."""
        return self.bandwidth or DEFAULT_BANDWIDTH


def check_admission(weights: WeightsOptions, admission: Admission) -> None:
    """Raise ConfigError if requests own memory by slices while weights come and go.

    A request whose weights left would keep the memory of its slice, and could not be preempted in between.
    """
    if weights.memory_bytes is not None and admission.slice_tokens is not None:
        raise ConfigError(
            "weights.memory: an admission by slices cannot be used where weights leave, since a request owns "
            "the memory of its slice; write another scheduler.admission, such as aggressive, or leave out "
            "weights.memory"
        )
