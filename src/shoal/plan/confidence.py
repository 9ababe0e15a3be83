"""How sure a mean over requests is, from one run of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
CONFIDENCE = 0.95
"""How often an interval holds the mean."""
_BLOCKS = 20
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and where it may well lie."""

    mean: float
    """Of what was seen."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""


def mean_interval(values: FloatArray, random: np.random.Generator) -> Interval:
    """The mean of ``values``, and an interval that holds the true one with probability ``CONFIDENCE``.

    values: of requests in the order of their arrival; NaN does not count. Neighbours wait for each other, so
    they are drawn again in blocks of consecutive ones, a twentieth of all in each, that begin anywhere and go
    on at the beginning after the end.
    Source: the circular block bootstrap (Politis and Romano, 1992), percentile interval.
    All three are NaN where nothing counts.
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
    """Sums of ``length`` consecutive values from each on, round the end."""
    running = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[: length - 1]]))])
    sums: FloatArray = running[length:] - running[:-length]
    return sums
