"""Linear interpolation between measured points."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from shoal.forecast.latency import FloatArray


class Line:
    """A piecewise linear function; constant before its first point, extrapolated after its last.

    ``at`` and ``many`` do the same operations in the same order, so their results are equal to the last bit.
    """

    def __init__(self, points: FloatArray, values: FloatArray) -> None:
        slopes = np.append(np.diff(values) / np.diff(points), 0.0) if len(points) > 1 else np.zeros(1)
        if len(points) > 1:
            slopes[-1] = max(float(slopes[-2]), 0.0)
        self._points, self._values, self._slopes = points, values, slopes
        self._lists = points.tolist(), values.tolist(), slopes.tolist()

    def at(self, x: float) -> float:
        """The value at ``x``."""
        points, values, slopes = self._lists
        if x < points[0]:
            x = points[0]
        i = bisect_right(points, x) - 1
        return float(values[i] + (x - points[i]) * slopes[i])

    def many(self, x: FloatArray) -> FloatArray:
        """The values at each of ``x``."""
        x = np.maximum(x, self._points[0])
        i = np.searchsorted(self._points, x, side="right") - 1
        result: FloatArray = self._values[i] + (x - self._points[i]) * self._slopes[i]
        return result


def bracket(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Index of the point of ``axis`` at or below ``x``, and the share of the way to the next.

    The share is above 1 beyond the last point.
    """
    if len(axis) == 1 or x <= axis[0]:
        return 0, 0.0
    i = min(bisect_right(axis, x) - 1, len(axis) - 2)
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])
