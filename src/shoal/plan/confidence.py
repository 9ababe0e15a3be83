"""Confidence interval of a mean over the requests of one run (block bootstrap)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
CONFIDENCE = 0.95
_BLOCKS = 20
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A sample mean with its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: FloatArray, random: np.random.Generator) -> Interval:
    """The mean of ``values`` and its interval at ``CONFIDENCE``; all NaN if every value is.

    values: one per request, by arrival; NaN does not count. Consecutive requests are correlated, so they are
    resampled in blocks of a twentieth of all, which begin anywhere and wrap around.
    Source: the circular block bootstrap (Politis and Romano, 1992), percentile interval.
    """
    counted = ~np.isnan(values)
    if not counted.any():
        return Interval(np.nan, np.nan, np.nan)
    length = -(-len(values) // _BLOCKS)
    blocks = -(-len(values) // length)
    sums = _window_sums(np.where(counted, values, 0.0), length)
    counts = _window_sums(counted.astype(np.float64), length)
    starts = random.integers(len(values), size=(_RESAMPLES, blocks))
    totals, weights = sums[starts].sum(axis=1), counts[starts].sum(axis=1)
    means = totals[weights > 0] / weights[weights > 0]
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.nanmean(values)), float(low), float(high))


def _window_sums(values: FloatArray, length: int) -> FloatArray:
    """Sums of ``length`` consecutive values from each position, wrapping around."""
    running = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[: length - 1]]))])
    sums: FloatArray = running[length:] - running[:-length]
    return sums
