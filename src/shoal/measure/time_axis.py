"""The time axis of a run, and curves of samples over it."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.measure.records import RunRecord, Sample
from shoal.measure.summary import run_window_ns

Floats = NDArray[np.float64]

TIME_POINTS = 200


class TimeAxis:
    """Time since the first arrival, in a unit that suits the length of the run."""

    def __init__(self, run: RunRecord) -> None:
        self.start_ns, self.end_ns = run_window_ns(run)
        length_s = (self.end_ns - self.start_ns) / 1e9
        unit, self.unit_ns = ("s", 1e9)
        if length_s > 5 * 3600:
            unit, self.unit_ns = ("h", 3600e9)
        elif length_s > 600:
            unit, self.unit_ns = ("min", 60e9)
        self.label = f"time since the first arrival, {unit}"

    def to_units(self, times_ns: Floats) -> Floats:
        return (times_ns - self.start_ns) / self.unit_ns


def downsample(
    times: Floats, values: Floats, points: int = TIME_POINTS
) -> tuple[Floats, Floats, Floats, Floats]:
    """A long curve in at most ``points`` bins: mean time, and lowest, mean and highest value of each.

    Equal times fall into the same bin, so several curves may be interleaved. The range shows the peak of a
    single sample, which the mean hides.
    """
    moments, bins = np.unique(times, return_inverse=True)
    count = min(points, len(moments))
    bins = bins * count // max(len(moments), 1)
    sizes = np.bincount(bins, minlength=count)
    lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(lowest, bins, values)
    np.maximum.at(highest, bins, values)
    return np.bincount(bins, times) / sizes, lowest, np.bincount(bins, values) / sizes, highest


def columns(samples: Sequence[Sample], value_of: Callable[[Sample], float]) -> tuple[Floats, Floats]:
    """Times and values of samples."""
    times: Floats = np.array([sample.time_ns for sample in samples], dtype=np.float64)
    values: Floats = np.array([value_of(sample) for sample in samples], dtype=np.float64)
    return times, values


def sum_by_time(samples: Sequence[Sample], value_of: Callable[[Sample], float]) -> tuple[Floats, Floats]:
    """The different times, and at each the sum over the engines; one without a sample there is idle."""
    times, values = columns(samples, value_of)
    moments, positions = np.unique(times, return_inverse=True)
    return moments, np.bincount(positions, values).astype(np.float64)
