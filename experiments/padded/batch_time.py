"""Durations of batches in simulated static engines: equal to the estimate, or with random errors."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from experiments.padded.batcher import Assignment
from shoal.batches import ServingTime
from shoal.core import ConfigError, uniform

_STANDARD = NormalDist()
_LARGEST_DEVIATION = 3.0


class BatchTime(Protocol):
    """The duration of batches. Must be pure."""

    def duration_s(self, assignment: Assignment, iterations_run: int, /) -> float:
        """Seconds for a batch that ran ``iterations_run`` iterations, its prefill the first of them."""
        ...


@dataclass(frozen=True, slots=True)
class ExactTime:
    """Batches take the estimated time of their padded shape and the iterations run."""

    time: ServingTime

    def duration_s(self, assignment: Assignment, iterations_run: int, /) -> float:
        batch = assignment.batch
        return self.time.serve(len(batch), batch.input_tokens, iterations_run)


@dataclass(frozen=True, slots=True)
class UncertainTime:
    """Batches take the estimated time with a random error.

    Raises ConfigError for errors that could make a time negative.
    """

    time: ServingTime
    spread: float
    """Relative standard deviation of an independent normal error, cut at three standard deviations.

    Errors are keyed by the number of the assignment, so runs with equal decisions have equal times.
    """
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.spread < 1 / _LARGEST_DEVIATION:
            raise ConfigError(f"spread of batch times must be in [0, 1/3), got {self.spread}")

    def duration_s(self, assignment: Assignment, iterations_run: int, /) -> float:
        drawn = max(uniform(self.seed, assignment.number), 1e-12)
        deviation = max(-_LARGEST_DEVIATION, min(_LARGEST_DEVIATION, _STANDARD.inv_cdf(drawn)))
        return ExactTime(self.time).duration_s(assignment, iterations_run) * (1 + self.spread * deviation)
