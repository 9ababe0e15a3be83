"""Tables of measured attention times, interpolated over prompt tokens, their key, decodes and context."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shoal.core import ConfigError
from shoal.forecast.latency import FloatArray


class Line:
    """A piecewise linear function: constant before its first point, extrapolated after its last.

    ``at`` and ``many`` do the same operations in the same order, so their results are bitwise equal.
    """

    def __init__(self, points: FloatArray, values: FloatArray) -> None:
        slopes = np.append(np.diff(values) / np.diff(points), 0.0) if len(points) > 1 else np.zeros(1)
        if len(points) > 1:
            slopes[-1] = max(float(slopes[-2]), 0.0)
        self._points, self._values, self._slopes = points, values, slopes
        self._lists = points.tolist(), values.tolist(), slopes.tolist()

    def at(self, x: float) -> float:
        points, values, slopes = self._lists
        if x < points[0]:
            x = points[0]
        i = bisect_right(points, x) - 1
        return float(values[i] + (x - points[i]) * slopes[i])

    def many(self, x: FloatArray) -> FloatArray:
        x = np.maximum(x, self._points[0])
        i = np.searchsorted(self._points, x, side="right") - 1
        result: FloatArray = self._values[i] + (x - self._points[i]) * self._slopes[i]
        return result


def bracket(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Index of the point of ``axis`` at or below ``x``, and the fraction of the way to the next point.

    The fraction is above 1 beyond the last point.
    """
    if len(axis) == 1 or x <= axis[0]:
        return 0, 0.0
    i = min(bisect_right(axis, x) - 1, len(axis) - 2)
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


PrefillPoint = tuple[int, float, int, int]
"""Prompt tokens, their key, decoding rows, mean context of decoding rows."""
Plane = list[list[float]]
"""Microseconds by decoding rows and context."""


def prefill_key(chunks: Sequence[tuple[int, int]]) -> float:
    """Mean number of positions that a prompt token attends, over all tokens of ``chunks``.

    chunks: (new tokens, computed before). A token attends all tokens before its chunk and, because attention
    is causal, on average half of the chunk: 50 positions in two chunks of 100 tokens without context, 100 in
    one chunk of 200 tokens. LLMServingSim's profiler has the same coordinate.
    """
    tokens = sum(count for count, _ in chunks)
    return sum(count * (before + count / 2) for count, before in chunks) / tokens


class PrefillKeyTable:
    """Microseconds of one layer's attention in a step, by prompt tokens, their key and decoding rows.

    Decodes only, prompts only, and both are three tables, because the kernels differ. The measured keys may
    differ between numbers of tokens: a short key with many tokens takes several chunks, whose lengths are
    whole numbers. Times are interpolated linearly along each axis; they are constant before the first point,
    and extrapolated without decreasing after the last.
    """

    def __init__(self, measured: Mapping[PrefillPoint, float], source: Path) -> None:
        """measured: microseconds, from the file ``source``.

        Points may be missing, for instance because their context does not fit in memory: see ``_planes``.
        Raises ConfigError if one of the three tables has no row.
        """
        alone: dict[int, dict[float, float]] = {}
        decodes_alone: dict[int, dict[float, float]] = {}
        mixed: dict[int, dict[PrefillPoint, float]] = {}
        for point, micros in measured.items():
            tokens, key, decodes, context = point
            if tokens and decodes:
                mixed.setdefault(tokens, {})[point] = micros
            elif tokens:
                alone.setdefault(tokens, {})[key] = micros
            elif decodes:
                decodes_alone.setdefault(decodes, {})[float(context)] = micros
        if not (alone and decodes_alone and mixed):
            raise ConfigError(
                f"{source}: rows with prefill_chunk 0, rows with n_decode 0 and rows with neither 0 are all "
                f"needed"
            )
        self._alone_axis, self._alone = sorted(alone), [_line(alone[tokens]) for tokens in sorted(alone)]
        self._decodes = sorted(decodes_alone)
        self._contexts = np.array(sorted({context for row in decodes_alone.values() for context in row}))
        self._by_decodes = [_line(decodes_alone[decodes]).many(self._contexts) for decodes in self._decodes]
        self._lines: dict[int, Line] = {}
        points = [point for row in mixed.values() for point in row]
        self._rows_axis = sorted({decodes for _, _, decodes, _ in points})
        self._context_axis = sorted({context for _, _, _, context in points})
        self._tokens = sorted(mixed)
        self._keys = [sorted({key for _, key, _, _ in mixed[tokens]}) for tokens in self._tokens]
        self._mixed = [_planes(mixed[tokens], self._rows_axis, self._context_axis) for tokens in self._tokens]

    def decode_line(self, decodes: int) -> Line:
        """Microseconds of a step with only ``decodes`` rows, by their mean context."""
        line = self._lines.get(decodes)
        if line is None:
            i, share = bracket(self._decodes, decodes)
            low, high = self._by_decodes[i], self._by_decodes[min(i + 1, len(self._decodes) - 1)]
            rise = (high - low) * share
            values = low + rise if share <= 1 else np.maximum(low + rise, high)
            line = self._lines[decodes] = Line(self._contexts, values)
        return line

    def chunks(self, rows: Sequence[tuple[int, int]], decodes: int, decode_context: float) -> float:
        """Microseconds of chunks (new tokens, computed before) with ``decodes`` rows of a mean context."""
        tokens, key = sum(count for count, _ in rows), prefill_key(rows)
        if not decodes:
            i, share = bracket(self._alone_axis, tokens)
            return _interpolate([line.at(key) for line in self._alone[i : i + 2]], share)
        i, share = bracket(self._tokens, tokens)
        positions = range(i, min(i + 2, len(self._tokens)))
        return _interpolate(
            [self._mixed_at(position, key, decodes, decode_context) for position in positions], share
        )

    def _mixed_at(self, position: int, key: float, decodes: int, context: float) -> float:
        """Microseconds at a measured number of prompt tokens (index ``position`` of the axis)."""
        j, key_share = bracket(self._keys[position], key)
        k, decode_share = bracket(self._rows_axis, decodes)
        m, context_share = bracket(self._context_axis, context)
        by_key = []
        for plane in self._mixed[position][j : j + 2]:
            by_decodes = [_interpolate(line[m : m + 2], context_share) for line in plane[k : k + 2]]
            by_key.append(_interpolate(by_decodes, decode_share))
        return _interpolate(by_key, key_share)


def _interpolate(ends: Sequence[float], share: float) -> float:
    """Interpolate between two ends, or take the only one; ``share`` above 1 extrapolates, not decreasing."""
    rise = ends[-1] - ends[0]
    return ends[-1] if share > 1 and rise < 0 else ends[0] + rise * share


def _line(values: Mapping[float, float]) -> Line:
    points = sorted(values)
    return Line(np.array(points, dtype=np.float64), np.array([values[point] for point in points]))


def _planes(
    measured: Mapping[PrefillPoint, float], rows_axis: Sequence[int], context_axis: Sequence[int]
) -> list[Plane]:
    """For each key of one number of prompt tokens, microseconds by all rows and all contexts.

    A missing point is interpolated along context or key, whichever changes less between its two neighbours:
    if the prompt dominates a kernel's time, it hardly depends on the decodes' context; if decodes dominate,
    hardly on the key. Without two neighbours it is extrapolated along context; without any context,
    interpolated along rows.
    """
    by_context: dict[tuple[float, int], dict[float, float]] = {}
    by_key: dict[tuple[int, int], dict[float, float]] = {}
    for (_, key, decodes, context), micros in measured.items():
        by_context.setdefault((key, decodes), {})[context] = micros
        by_key.setdefault((decodes, context), {})[key] = micros
    planes = []
    for key in sorted({key for key, _ in by_context}):
        lines = {
            decodes: [
                _fill_missing(by_context[key, decodes], context, by_key.get((decodes, context), {}), key)
                for context in context_axis
            ]
            for decodes in rows_axis
            if (key, decodes) in by_context
        }
        columns = [
            _line({decodes: line[m] for decodes, line in lines.items()}) for m in range(len(context_axis))
        ]
        planes.append([lines.get(rows) or [column.at(rows) for column in columns] for rows in rows_axis])
    return planes


def _fill_missing(
    along_context: Mapping[float, float], context: int, along_key: Mapping[float, float], key: float
) -> float:
    """Microseconds at ``context`` and ``key``, from one of the two lines through that point."""
    if context in along_context:
        return along_context[context]
    estimates = []
    for line, position in ((along_context, float(context)), (along_key, key)):
        low = max((point for point in line if point < position), default=None)
        high = min((point for point in line if point > position), default=None)
        if low is not None and high is not None:
            rise = line[high] - line[low]
            estimates.append((abs(rise), line[low] + rise * (position - low) / (high - low)))
    return min(estimates)[1] if estimates else _line(along_context).at(context)


ChunkPoint = tuple[int, int, int, int]
"""Tokens of a prompt chunk, tokens computed before it, decoding rows, mean context of decoding rows."""


def by_prefill_key(measured: Mapping[ChunkPoint, float]) -> dict[PrefillPoint, float]:
    """Convert microseconds by chunk and context to microseconds by key; points may be missing.

    Such a grid has no steps with several chunks, whose key is lower than that of a single chunk of as many
    tokens. So points are added for equal chunks without context: the first takes its time with the decodes,
    each other its time without them, less the start of a kernel.
    """
    points: dict[PrefillPoint, float] = {}
    for (chunk, before, decodes, context), micros in measured.items():
        points[chunk, prefill_key([(chunk, before)]) if chunk else 0.0, decodes, context] = micros
    alone = {
        chunk: micros
        for (chunk, before, decodes, _), micros in measured.items()
        if chunk and not before and not decodes
    }
    start = min(alone.values(), default=0.0)
    chunks = sorted({chunk for chunk, *_ in measured if chunk})
    for (chunk, before, decodes, context), micros in measured.items():
        if chunk in alone and not before:
            for tokens in (tokens for tokens in chunks if tokens > chunk):
                others = (tokens / chunk - 1) * (alone[chunk] - start)
                points[tokens, prefill_key([(chunk, 0)]), decodes, context] = micros + others
    return points
