"""Piecewise linear step-time model: a curve over tokens, plus the cost of attention.

A step reads all weights once, so the first tokens cost almost nothing and later ones more; and kernels differ
by size. A linear model has errors of about 10%. The curve is linear between powers of two; the cost of
attention is per decoding row, per prompt chunk, and per attended position.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shoal.core import ConfigError
from shoal.forecast.latency import FloatArray, require_cost
from shoal.forecast.step_times import StepRows


@dataclass(frozen=True, slots=True)
class PiecewiseCost:
    """A cost by a count: 0 at 0, linear between knots, extrapolated beyond the last.

    Raises ConfigError if knots do not increase or the cost decreases.
    """

    knots: tuple[int, ...]
    """Increasing counts above 0."""
    seconds: tuple[float, ...]
    """The cost at each knot, not decreasing."""

    def __post_init__(self) -> None:
        if len(self.knots) != len(self.seconds):
            raise ConfigError(f"{len(self.knots)} knots need as many seconds, got {len(self.seconds)}")
        if any(after <= before for before, after in pairwise((0, *self.knots))):
            raise ConfigError(f"knots must rise and begin above 0, got {list(self.knots)}")
        for value in self.seconds:
            require_cost("seconds", value)
        if any(after < before for before, after in pairwise(self.seconds)):
            raise ConfigError(f"seconds must never fall, got {list(self.seconds)}")

    def at(self, count: int) -> float:
        if count <= 0 or not self.knots:
            return 0.0
        piece = min(bisect_right(self.knots, count), len(self.knots) - 1)
        above, high = self.knots[piece], self.seconds[piece]
        below, low = (self.knots[piece - 1], self.seconds[piece - 1]) if piece else (0, 0.0)
        return low + (high - low) * (count - below) / (above - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveTimes:
    """Step time as a sum of costs in seconds, two of which are piecewise linear.

    Raises ConfigError for values that cannot be costs.
    """

    constant_s: float
    """Per step."""
    tokens: PiecewiseCost
    """By computed tokens."""
    decodes: PiecewiseCost
    """By decoding rows, in addition to the cost of their tokens."""
    chunk_s: float
    """Per prompt chunk."""
    context_s: float
    """Per position that a decoding row attends."""
    work_s: float
    """Per position that a token of a chunk attends."""

    def __post_init__(self) -> None:
        for name in ("constant_s", "chunk_s", "context_s", "work_s"):
            require_cost(name, getattr(self, name))

    def step_time(self, rows: StepRows) -> float:
        seconds = self._base(rows.new_tokens, rows.decodes) + self.context_s * rows.decode_context
        if rows.chunks:
            work = sum(count * before + count * (count + 1) // 2 for count, before in rows.chunks)
            seconds += self.chunk_s * len(rows.chunks) + self.work_s * work
        return seconds

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """As in ``StepTimes``; costs are added in the same order as in ``step_time``."""
        contexts = np.arange(context, context + sequences * steps, sequences, dtype=np.int64)
        return np.asarray(self._base(sequences, sequences) + self.context_s * contexts, dtype=np.float64)

    def execution_time(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds of a request alone: L^ of SeaLLM's Eq. 7, the divisor of normalised latency."""
        chunk = (prompt_tokens, 0)
        first = StepRows(0, 0, (chunk,), 1) if prompt_tokens > 1 else StepRows(1, 1, (), 1)
        decodes = self.decode_times(1, prompt_tokens + 1, output_tokens - 1)
        return self.step_time(first) + float(decodes.sum())

    def _base(self, new_tokens: int, decodes: int) -> float:
        return self.constant_s + self.tokens.at(new_tokens) + self.decodes.at(decodes)
