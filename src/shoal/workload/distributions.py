"""Distributions of prompt and output lengths.

A ``LengthDistribution`` gives pairs (prompt, output). Most are ``Independent``: one ``SideDistribution`` for
prompts and one for outputs. Draws depend only on the seed; the first n lengths do not depend on the count
(except for ``Concatenation``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core import ConfigError, derive_seed
from shoal.workload.rows import TraceRow

IntArray = NDArray[np.int64]
LARGEST = 2**31


class SideDistribution(Protocol):
    """Lengths of prompts or of outputs."""

    def draw(self, count: int, seed: int) -> IntArray:
        """``count`` lengths in tokens, at least 1."""
        ...


class LengthDistribution(Protocol):
    """Lengths of prompts and outputs."""

    def sample(self, count: int, seed: int) -> tuple[IntArray, IntArray]:
        """``count`` prompt lengths and output lengths, in tokens, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """A constant length."""

    tokens: int

    def __post_init__(self) -> None:
        _check_range(self.tokens, self.tokens)

    def draw(self, count: int, seed: int) -> IntArray:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Uniformly distributed integers from ``low`` to ``high``."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    def draw(self, count: int, seed: int) -> IntArray:
        return np.random.default_rng(seed).integers(self.low, self.high + 1, count, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormalLength:
    """Lognormal lengths, clipped to ``low`` and ``high``."""

    mu: float
    """Mean of the logarithm; the median is exp(mu)."""
    sigma: float
    """Standard deviation of the logarithm."""
    low: int = 1
    high: int = LARGEST

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if not (math.isfinite(self.mu) and 0 <= self.sigma <= 20):
            raise ConfigError(
                f"lognormal needs a finite mu and sigma from 0 to 20, got {self.mu}, {self.sigma}"
            )

    def draw(self, count: int, seed: int) -> IntArray:
        normal = np.random.default_rng(seed).standard_normal(count)
        return _round_and_clip(np.exp(np.minimum(self.mu + self.sigma * normal, 40.0)), self.low, self.high)


@dataclass(frozen=True, slots=True)
class GammaLength:
    """Gamma-distributed lengths, clipped to ``low`` and ``high``."""

    mean: float
    """Mean before clipping."""
    cv: float
    """Coefficient of variation before clipping."""
    low: int = 1
    high: int = LARGEST

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        if not (0 < self.mean <= LARGEST and 0.01 <= self.cv <= 100):
            raise ConfigError(
                f"gamma needs a mean above 0 and cv from 0.01 to 100, got {self.mean}, {self.cv}"
            )

    def draw(self, count: int, seed: int) -> IntArray:
        shape = self.cv**-2
        draws = np.random.default_rng(seed).standard_gamma(shape, count) * (self.mean / shape)
        return _round_and_clip(draws, self.low, self.high)


@dataclass(frozen=True, slots=True)
class MixtureLength:
    """A mixture of distributions; each length is from one of them, chosen by weight."""

    parts: tuple[tuple[float, SideDistribution], ...]
    """(weight, distribution) of each."""

    def __post_init__(self) -> None:
        _check_weights([weight for weight, _ in self.parts])

    def draw(self, count: int, seed: int) -> IntArray:
        chosen = _choose([weight for weight, _ in self.parts], count, derive_seed(seed, 0))
        draws = [part.draw(count, derive_seed(seed, 1, index)) for index, (_, part) in enumerate(self.parts)]
        return np.stack(draws)[chosen, np.arange(count)]


@dataclass(frozen=True, slots=True)
class Independent:
    """Independent prompt and output lengths."""

    prompt: SideDistribution
    output: SideDistribution

    def sample(self, count: int, seed: int) -> tuple[IntArray, IntArray]:
        return self.prompt.draw(count, derive_seed(seed, 0)), self.output.draw(count, derive_seed(seed, 1))


@dataclass(frozen=True, slots=True)
class Empirical:
    """Pairs drawn from a table, with replacement."""

    pairs: tuple[tuple[int, int], ...]
    """(prompt, output) lengths."""

    def __post_init__(self) -> None:
        if not self.pairs or min(map(min, self.pairs)) < 1:
            raise ConfigError("an empirical distribution needs at least one pair, and lengths of at least 1")

    @classmethod
    def of(cls, rows: Sequence[TraceRow]) -> "Empirical":
        return cls(tuple((row.prompt_tokens, row.output_tokens) for row in rows))

    def sample(self, count: int, seed: int) -> tuple[IntArray, IntArray]:
        table = np.array(self.pairs, dtype=np.int64)
        chosen = table[np.random.default_rng(seed).integers(0, len(table), count)]
        return chosen[:, 0].copy(), chosen[:, 1].copy()


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of distributions; each request is from one of them, chosen by weight."""

    parts: tuple[tuple[float, LengthDistribution], ...]
    """(weight, distribution) of each."""

    def __post_init__(self) -> None:
        _check_weights([weight for weight, _ in self.parts])

    def sample(self, count: int, seed: int) -> tuple[IntArray, IntArray]:
        chosen = _choose([weight for weight, _ in self.parts], count, derive_seed(seed, 0))
        draws = [
            part.sample(count, derive_seed(seed, 1, index)) for index, (_, part) in enumerate(self.parts)
        ]
        requests = np.arange(count)
        prompts, outputs = (np.stack(side) for side in zip(*draws, strict=True))
        return prompts[chosen, requests], outputs[chosen, requests]


@dataclass(frozen=True, slots=True)
class Concatenation:
    """A workload that changes: one distribution after the other, each for its share of the requests."""

    parts: tuple[tuple[float, LengthDistribution], ...]
    """(share of the requests, distribution) of each."""

    def __post_init__(self) -> None:
        _check_weights([weight for weight, _ in self.parts])

    def sample(self, count: int, seed: int) -> tuple[IntArray, IntArray]:
        shares = np.cumsum([weight for weight, _ in self.parts])
        ends = np.rint(shares / shares[-1] * count).astype(int).tolist()
        draws = [
            part.sample(end - start, derive_seed(seed, index))
            for index, ((_, part), start, end) in enumerate(zip(self.parts, [0, *ends], ends, strict=False))
        ]
        prompts, outputs = (np.concatenate(side) for side in zip(*draws, strict=True))
        return prompts, outputs


SIDE_DISTRIBUTIONS: Mapping[str, type[FixedLength | UniformLength | LogNormalLength | GammaLength]] = {
    "fixed": FixedLength,
    "uniform": UniformLength,
    "lognormal": LogNormalLength,
    "gamma": GammaLength,
}
"""Distributions of prompts or outputs by name in configuration files."""


def _choose(weights: Sequence[float], count: int, seed: int) -> NDArray[np.intp]:
    cumulative = np.cumsum(weights)
    draws = np.random.default_rng(seed).random(count)
    return np.searchsorted(cumulative[:-1] / cumulative[-1], draws, side="right")


def _round_and_clip(lengths: NDArray[np.float64], low: int, high: int) -> IntArray:
    return np.clip(np.rint(lengths), low, high).astype(np.int64)


def _check_range(low: int, high: int) -> None:
    if not 1 <= low <= high <= LARGEST:
        raise ConfigError(f"lengths must be from 1 to {LARGEST} tokens, low first; got {low} to {high}")


def _check_weights(weights: Sequence[float]) -> None:
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"parts need weights of more than 0, got {list(weights)}")
