"""Linear step-time model of continuous batches.

A continuous batch has no padding, so its time follows from four counts: sequences, computed tokens, cached
positions read by decoding rows, and (query, key) pairs of prefill chunks. SCLS's formulas for padded batches
(``latency_padded``) are the special case of equal rows.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core import ConfigError

FloatArray = NDArray[np.float64]
Counts = NDArray[np.int64] | NDArray[np.float64] | int
"""One number, or one for each of several steps."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The computation of one step in four counts."""

    sequences: int
    new_tokens: int
    """Tokens computed by all rows."""
    decode_context: int
    """Positions attended by decoding rows (those with one new token), including the new tokens."""
    prefill_work: int
    """Sum of positions attended by the new tokens of other rows: q * (c + (q + 1) / 2) for a chunk of q
    tokens after c computed tokens, because attention is causal."""

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> "StepShape":
        """From rows of (new tokens, tokens computed before)."""
        sequences = new_tokens = decode_context = prefill_work = 0
        for count, context in rows:
            sequences += 1
            new_tokens += count
            if count == 1:
                decode_context += context + 1
            else:
                prefill_work += _attended(count, context)
        return cls(sequences, new_tokens, decode_context, prefill_work)

    @classmethod
    def equal_rows(cls, sequences: int, new_tokens: int, context: int) -> "StepShape":
        """From ``sequences`` rows, each with ``new_tokens`` after ``context`` computed tokens."""
        attended = sequences * _attended(new_tokens, context)
        decodes = new_tokens == 1
        return cls(sequences, sequences * new_tokens, attended if decodes else 0, 0 if decodes else attended)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Step time as a sum of costs in seconds.

    Costs are finite and not negative, so a larger step never takes less time. Raises ConfigError otherwise.
    """

    constant_s: float
    """Per step."""
    sequence_s: float
    """Per row."""
    token_s: float
    """Per new token."""
    context_s: float
    """Per position that a decoding row attends."""
    work_s: float
    """Per position that a prefill token attends."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require_cost(name, getattr(self, name))

    def step_time(self, shape: StepShape) -> float:
        return (
            self.constant_s
            + self.sequence_s * shape.sequences
            + self.token_s * shape.new_tokens
            + self.context_s * shape.decode_context
            + self.work_s * shape.prefill_work
        )

    def step_times(
        self, sequences: Counts, new_tokens: Counts, decode_context: Counts, prefill_work: Counts
    ) -> FloatArray:
        """Seconds of many steps; the counts are arrays or numbers that broadcast."""
        return np.asarray(
            self.constant_s
            + np.multiply(self.sequence_s, sequences)
            + np.multiply(self.token_s, new_tokens)
            + np.multiply(self.context_s, decode_context)
            + np.multiply(self.work_s, prefill_work),
            dtype=np.float64,
        )

    def slice_time(self, sequences: int, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds for a batch of equal prompts to generate ``output_tokens`` each, in closed form.

        One step prefills all prompts and samples the first tokens; output_tokens - 1 decode steps follow,
        which attend prompt_tokens + 1, prompt_tokens + 2, ... positions.
        """
        decodes = output_tokens - 1
        per_decode = self.constant_s + (self.sequence_s + self.token_s) * sequences
        attended = sequences * sum_of_lengths(prompt_tokens, output_tokens)
        prefill = self.step_time(StepShape.equal_rows(sequences, prompt_tokens, 0))
        return prefill + decodes * per_decode + self.context_s * attended

    def execution_time(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds of a request alone: L^ of SeaLLM's Eq. 7, the divisor of normalised latency."""
        return self.slice_time(1, prompt_tokens, output_tokens)


def shape_matrix(shapes: Iterable[StepShape]) -> FloatArray:
    """Rows of [sequences, new tokens, decode context, prefill work]."""
    return np.array([astuple(shape) for shape in shapes], dtype=np.float64).reshape(-1, 4)


def sum_of_lengths(prompt_tokens: int, output_tokens: int) -> int:
    """Sum of the positions that one row's decode steps attend: l = L + 1 .. L + S - 1."""
    decodes = output_tokens - 1
    return decodes * prompt_tokens + decodes * output_tokens // 2


def require_cost(name: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is finite and not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"latency cost {name} must be a finite number of at least 0, got {value!r}")


def _attended(new_tokens: int, context: int) -> int:
    """Sum of the positions that the tokens of a causal chunk attend."""
    return new_tokens * context + new_tokens * (new_tokens + 1) // 2
