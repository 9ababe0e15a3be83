"""When the pool is emptied into batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.core import ConfigError


class Interval(Protocol):
    """How long requests gather before batches are formed of them."""

    def after_s(self, loads: Sequence[float]) -> float | None:
        """Seconds from one forming of batches to the next, given every worker's load after the first.

        None: there is no common pool. Requests are assigned to workers as they come, and an idle
        worker takes its next batch from those assigned to it.
        """
        ...


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """No interval: an idle worker takes its next batch (sequence-level scheduling)."""

    def after_s(self, loads: Sequence[float]) -> float | None:
        """None."""
        return None


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """Every ``seconds``."""

    seconds: float

    def __post_init__(self) -> None:
        """Refuse a negative interval; raises ConfigError."""
        if self.seconds < 0:
            raise ConfigError(f"a batching interval must not be negative, got {self.seconds} s")

    def after_s(self, loads: Sequence[float]) -> float | None:
        """Always the same."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class AdaptiveInterval:
    """The more work waits, the longer: max(factor x least load, shortest) (SCLS, section 4.6)."""

    shortest: float
    """Seconds; the paper's Gamma."""
    factor: float = 0.5
    """Below 1, so that an overestimated load leaves no worker idle; the paper's lambda."""

    def __post_init__(self) -> None:
        """Refuse numbers without meaning; raises ConfigError."""
        if self.shortest < 0:
            raise ConfigError(f"a batching interval must not be negative, got {self.shortest} s")
        if not 0 <= self.factor < 1:
            raise ConfigError(f"factor of an adaptive interval must be in [0, 1), got {self.factor}")

    def after_s(self, loads: Sequence[float]) -> float | None:
        """By the least loaded worker."""
        return max(self.factor * min(loads), self.shortest)
