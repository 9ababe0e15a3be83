"""What an engine's host adds to the steps of its device."""

from dataclasses import dataclass

from shoal.core import ConfigError
from shoal.forecast.latency import FloatArray
from shoal.forecast.step_times import StepRows, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverhead:
    """Seconds that steps take beyond the device's kernels.

    Kernels of decode steps are often recorded and started as one (a CUDA graph), so that the host adds little
    to such a step. Those of a step with prompt tokens are started one by one, layer by layer, so that what
    the host adds there grows with the model's depth and hardly with the prompt.
    """

    step_s: float = 0.0
    """Of every step."""
    prompt_s: float = 0.0
    """More, of each step that computes a chunk of a prompt."""
    layer_s: float = 0.0
    """More, of each of the model's layers in such a step."""

    def __post_init__(self) -> None:
        """Refuse times below 0; raises ConfigError."""
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"the overhead of a step must not be negative, got {getattr(self, name)}")


NO_OVERHEAD = HostOverhead()
"""A host that adds nothing."""


class OverheadTimes:
    """The step times of a device, and what its host adds."""

    def __init__(self, times: StepTimes, overhead: HostOverhead, layers: int) -> None:
        """layers: of the model."""
        self._times = times
        self._step_s = overhead.step_s
        self._chunks_s = overhead.step_s + overhead.prompt_s + overhead.layer_s * layers

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step."""
        return self._times.step_time(rows) + (self._chunks_s if rows.computes_prompts else self._step_s)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of a run of decode steps."""
        return self._times.decode_times(sequences, context, steps) + self._step_s
