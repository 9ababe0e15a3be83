"""Arrival processes: Poisson, Gamma, Weibull, uniform, at once, replay of a trace.

Times depend only on the seed; the first n times do not depend on the count. Rates are requests per second.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core import ConfigError
from shoal.workload.rows import LARGEST_S

LARGEST_TIME_SCALE = 1e6
LARGEST_CV = 100.0
SMALLEST_CV = 0.01


class ArrivalProcess(Protocol):
    """Arrival times of requests."""

    def times_ns(self, count: int, seed: int) -> list[int]:
        """Arrival times of the first ``count`` requests in nanoseconds, sorted, not negative."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent requests: exponential inter-arrival times."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times_ns(self, count: int, seed: int) -> list[int]:
        return _arrival_times(np.random.default_rng(seed).standard_exponential(count) / self.rate)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed inter-arrival times."""

    rate: float
    cv: float
    """Coefficient of variation of inter-arrival times; 1 is a Poisson process, more is burstier."""

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_cv(self.cv)

    def times_ns(self, count: int, seed: int) -> list[int]:
        shape = self.cv**-2
        return _arrival_times(np.random.default_rng(seed).standard_gamma(shape, count) / (shape * self.rate))


@dataclass(frozen=True, slots=True)
class Weibull:
    """Weibull-distributed inter-arrival times."""

    rate: float
    cv: float
    """Coefficient of variation of inter-arrival times."""

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_cv(self.cv)

    def times_ns(self, count: int, seed: int) -> list[int]:
        shape = weibull_shape(self.cv)
        mean = math.gamma(1 + 1 / shape)
        return _arrival_times(np.random.default_rng(seed).weibull(shape, count) / (mean * self.rate))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Evenly spaced requests, the first at 0."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times_ns(self, count: int, seed: int) -> list[int]:
        return [round(number / self.rate * 1e9) for number in range(count)]


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All requests at 0, to measure the throughput of a saturated server."""

    def times_ns(self, count: int, seed: int) -> list[int]:
        return [0] * count


@dataclass(frozen=True, slots=True)
class Replay:
    """The arrival times of a trace, scaled."""

    time_scale: float = 1.0
    """Factor of all times; 0.5 doubles the load."""
    rate: float | None = None
    """Mean rate to scale to, instead of ``time_scale``."""
    times: Sequence[int] = ()
    """Sorted arrival times in nanoseconds; ``build_requests`` sets those of its trace."""

    def __post_init__(self) -> None:
        check_time_scale(self.time_scale)
        if self.rate is not None:
            _check_rate(self.rate)
            if self.time_scale != 1:
                raise ConfigError("a replay takes time_scale or rate, not both")

    def times_ns(self, count: int, seed: int) -> list[int]:
        """The first ``count`` times, beginning at 0; the seed has no effect.

        Raises ConfigError if there are fewer, or if all are equal, so that they have no rate.
        """
        if count > len(self.times):
            raise ConfigError(
                f"{count} arrivals asked of a replay of {len(self.times)}; ask for fewer requests"
            )
        offsets = [time - self.times[0] for time in self.times[:count]]
        scale = self.time_scale if self.rate is None else self._scale_to(self.rate, offsets)
        return offsets if scale == 1 else [round(offset * scale) for offset in offsets]

    @staticmethod
    def _scale_to(rate: float, offsets: Sequence[int]) -> float:
        if len(offsets) < 2:
            return 1.0
        if not offsets[-1]:
            raise ConfigError("all requests of the trace arrive at one time; no scale gives them a rate")
        return (len(offsets) - 1) * 1e9 / (rate * offsets[-1])


ARRIVALS: Mapping[str, type[Poisson | Gamma | Weibull | Uniform | AtOnce | Replay]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "weibull": Weibull,
    "uniform": Uniform,
    "at-once": AtOnce,
    "replay": Replay,
}
"""Arrival processes by name in configuration files."""


@cache
def weibull_shape(cv: float) -> float:
    """The shape k of the Weibull distribution with a coefficient of variation.

    Solves lgamma(1 + 2/k) - 2 lgamma(1 + 1/k) = ln(1 + cv^2), whose left side decreases with k, by bisection.
    """
    target = math.log1p(cv * cv)
    low, high = 0.05, 1000.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        value = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle)
        low, high = (middle, high) if value > target else (low, middle)
    return math.sqrt(low * high)


def check_time_scale(time_scale: float) -> None:
    """Raise ConfigError for a scale out of range."""
    if not 0 < time_scale <= LARGEST_TIME_SCALE:
        raise ConfigError(
            f"time_scale must be more than 0 and at most {LARGEST_TIME_SCALE:g}, got {time_scale}; 0.5 "
            "doubles the load"
        )


def check_span(seconds: float, count: int) -> None:
    """Raise ConfigError if the last of ``count`` requests arrives after more than a hundred years."""
    if not seconds <= LARGEST_S:
        raise ConfigError(
            f"the last of {count:,} requests would arrive after {seconds / LARGEST_S * 100:.3g} years, and a "
            "hundred are the most; give a higher rate, a smaller time_scale or fewer requests"
        )


def _arrival_times(intervals_s: NDArray[np.float64]) -> list[int]:
    check_span(float(intervals_s.sum()), len(intervals_s))
    # Intervals are rounded before they are summed: exact sums, which do not depend on the count.
    total: list[int] = np.cumsum(np.rint(intervals_s * 1e9).astype(np.int64)).tolist()
    return total


def _check_rate(rate: float) -> None:
    if not 1e-3 <= rate <= 1e9:
        raise ConfigError(f"rate must be from 0.001 to 1e9 requests per second, got {rate}")


def _check_cv(cv: float) -> None:
    if not SMALLEST_CV <= cv <= LARGEST_CV:
        raise ConfigError(
            f"cv must be from {SMALLEST_CV} to {LARGEST_CV:g} (1 is a Poisson process), got {cv}"
        )
