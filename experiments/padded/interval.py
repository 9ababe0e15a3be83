"""Batching interval: how long requests gather in the pool before batches are formed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.core import ConfigError


class Interval(Protocol):
    """The time between two formations of batches."""

    def after_s(self, loads: Sequence[float]) -> float | None:
        """Seconds until batches are formed again; loads: estimated seconds of work by worker.

        None: there is no common pool. Requests are assigned to workers on arrival, and an idle worker forms
        its next batch from its own requests.
        """
        ...


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """No interval: an idle worker takes its next batch (sequence-level scheduling)."""

    def after_s(self, loads: Sequence[float]) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """A constant interval; raises ConfigError for a negative one."""

    seconds: float

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ConfigError(f"a batching interval must not be negative, got {self.seconds} s")

    def after_s(self, loads: Sequence[float]) -> float | None:
        return self.seconds


@dataclass(frozen=True, slots=True)
class AdaptiveInterval:
    """max(factor x least load, shortest): longer with more waiting work (SCLS, section 4.6).

    Raises ConfigError for numbers out of range.
    """

    shortest: float
    """Seconds; the paper's Gamma."""
    factor: float = 0.5
    """Below 1, so that workers do not become idle if loads are overestimated; the paper's lambda."""

    def __post_init__(self) -> None:
        if self.shortest < 0:
            raise ConfigError(f"a batching interval must not be negative, got {self.shortest} s")
        if not 0 <= self.factor < 1:
            raise ConfigError(f"factor of an adaptive interval must be in [0, 1), got {self.factor}")

    def after_s(self, loads: Sequence[float]) -> float | None:
        return max(self.factor * min(loads), self.shortest)
