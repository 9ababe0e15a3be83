"""Host overhead: time that the CPU adds to each step of a device."""

from dataclasses import dataclass

from shoal.core import ConfigError
from shoal.forecast.latency import FloatArray
from shoal.forecast.step_times import StepRows, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverhead:
    """Seconds that steps take in addition to the device's kernels; raises ConfigError below 0.

    Kernels of decode steps are often launched as one CUDA graph, with little overhead. In a step with prompt
    tokens they are launched one by one, so overhead grows with the number of layers, and hardly with the
    prompt.
    """

    step_s: float = 0.0
    """Per step."""
    prompt_s: float = 0.0
    """In addition, per step with a prompt chunk."""
    layer_s: float = 0.0
    """In addition, per layer in a step with a prompt chunk."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"the overhead of a step must not be negative, got {getattr(self, name)}")


NO_OVERHEAD = HostOverhead()


class OverheadTimes:
    """Step times of a device, with host overhead."""

    def __init__(self, times: StepTimes, overhead: HostOverhead, layers: int) -> None:
        """layers: number of layers of the model."""
        self._times = times
        self._step_s = overhead.step_s
        self._chunks_s = overhead.step_s + overhead.prompt_s + overhead.layer_s * layers

    def step_time(self, rows: StepRows) -> float:
        return self._times.step_time(rows) + (self._chunks_s if rows.computes_prompts else self._step_s)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        return self._times.decode_times(sequences, context, steps) + self._step_s
