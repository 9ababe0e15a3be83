"""Attention times interpolated between measured points: linear along each axis of a grid."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.core import ConfigError
from shoal.forecast.latency import FloatArray

Key = tuple[int, ...]
"""Chunk, its context, decodes, their context."""


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


class AttentionGrid:
    """Microseconds of one layer's attention in a step, by its chunk of a prompt and its decoding rows.

    There are two grids: decodes alone (decodes x context), and with a chunk (chunk x its context x decodes x
    their context), where 0 decodes is a point of the third axis. A chunk smaller than the smallest measured
    one costs as much as that; beyond the largest points times are extrapolated.
    """

    def __init__(self, measured: Mapping[Key, float], source: Path) -> None:
        """measured: microseconds by (chunk, chunk context, decodes, decode context), from ``source``.

        Raises ConfigError if a point of the grid is missing.
        """
        decode_only = {key: micros for key, micros in measured.items() if key[0] == 0 and key[2] > 0}
        mixed = {key: micros for key, micros in measured.items() if key[0] > 0}
        if not decode_only or not any(key[2] == 0 for key in mixed):
            raise ConfigError(f"{source}: rows with prefill_chunk 0 and rows with n_decode 0 are both needed")
        self._decodes = _axis(key[2] for key in decode_only)
        contexts = _axis(key[3] for key in decode_only)
        self._decode_contexts = np.array(contexts, dtype=np.float64)
        self._decode_only = _table(decode_only, ([0], [0], self._decodes, contexts), source)[0, 0]
        self._lines: dict[int, Line] = {}
        axes = [_axis(key[axis] for key in mixed) for axis in range(4)]
        if len(axes[3]) > 1:
            axes[3] = [context for context in axes[3] if context > 0]
        self._axes = axes
        self._mixed = _table(_repeat_no_decodes(mixed, axes[3]), axes, source).tolist()

    def decode_line(self, decodes: int) -> Line:
        """Microseconds of ``decodes`` rows alone, by their mean context."""
        line = self._lines.get(decodes)
        if line is None:
            i, share = bracket(self._decodes, decodes)
            low, high = self._decode_only[i], self._decode_only[min(i + 1, len(self._decodes) - 1)]
            line = self._lines[decodes] = Line(self._decode_contexts, low + (high - low) * share)
        return line

    def mixed(self, chunk: int, context: int, decodes: int, decode_context: float) -> float:
        """Microseconds of a chunk after ``context`` tokens, beside ``decodes`` rows of that mean context."""
        table, axes = self._mixed, self._axes
        values = []
        i, chunk_share = bracket(axes[0], chunk)
        j, context_share = bracket(axes[1], context)
        k, decode_share = bracket(axes[2], decodes)
        m, length_share = bracket(axes[3], decode_context)
        for by_context in table[i : i + 2]:
            for by_decodes in by_context[j : j + 2]:
                for by_length in by_decodes[k : k + 2]:
                    pair = by_length[m : m + 2]
                    values.append(pair[0] + (pair[-1] - pair[0]) * length_share)
        for axis, place, share in ((2, k, decode_share), (1, j, context_share), (0, i, chunk_share)):
            if place + 1 < len(axes[axis]):
                values = [
                    low + (high - low) * share for low, high in zip(values[::2], values[1::2], strict=True)
                ]
        return float(values[0])

    def chunks(self, rows: Sequence[tuple[int, int]], decodes: int, decode_context: float) -> float:
        """Microseconds of several chunks (new tokens, computed before) beside the decoding rows.

        The longest chunk goes with the decodes; each other adds its time alone, less that of the smallest
        measured chunk, which is the time to start a kernel.
        """
        longest = max(range(len(rows)), key=lambda row: rows[row])
        micros = self.mixed(*rows[longest], decodes, decode_context)
        if len(rows) > 1:
            start = self.mixed(self._axes[0][0], 0, 0, 0.0)
            for row, (chunk, context) in enumerate(rows):
                if row != longest:
                    micros += max(self.mixed(chunk, context, 0, 0.0) - start, 0.0)
        return micros


def bracket(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Index of the point of ``axis`` at or below ``x``, and the share of the way to the next.

    The share is above 1 beyond the last point.
    """
    if len(axis) == 1 or x <= axis[0]:
        return 0, 0.0
    i = min(bisect_right(axis, x) - 1, len(axis) - 2)
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


def _axis(values: Iterable[int]) -> list[int]:
    return sorted(set(values))


def _repeat_no_decodes(mixed: Mapping[Key, float], contexts: Sequence[int]) -> dict[Key, float]:
    """Repeat each measurement without decodes for all decode contexts, which do not matter there."""
    table = {key: micros for key, micros in mixed.items() if key[2] > 0}
    for (chunk, context, decodes, _), micros in mixed.items():
        if decodes == 0:
            table.update({(chunk, context, 0, length): micros for length in contexts})
    return table


def _table(measured: Mapping[Key, float], axes: Sequence[Sequence[int]], source: Path) -> NDArray[np.float64]:
    missing = [key for key in product(*axes) if key not in measured]
    if missing:
        names = "prefill_chunk {}, kv_prefill {}, n_decode {}, kv_decode {}".format(*missing[0])
        raise ConfigError(f"{source}: {len(missing)} points of the grid are missing, such as {names}")
    return np.array([measured[key] for key in product(*axes)]).reshape([len(axis) for axis in axes])
