"""A linear model of step time.

A continuous batch has no padding, so its time follows from four counts of the step: how many sequences
are in it, how many tokens it computes, how many cached positions its decoding rows read, and how many
(query, key) pairs its prefill chunks attend. SCLS's padded forms (``latency_padded``) are the special
case in which all rows are equal.
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
    """What one step computes, in counts."""

    sequences: int
    """Rows of the step."""
    new_tokens: int
    """Tokens computed by all rows."""
    decode_context: int
    """Positions attended by decoding rows (those with one new token), including the new token."""
    prefill_work: int
    """Positions attended by each new token of the other rows, summed: a chunk of q tokens after c computed
    ones attends q * (c + (q + 1) / 2), because attention is causal."""

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> "StepShape":
        """The shape of a step with these rows (new tokens, tokens computed before)."""
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
        """The shape of ``sequences`` rows, each with ``new_tokens`` after ``context`` computed tokens."""
        attended = sequences * _attended(new_tokens, context)
        decodes = new_tokens == 1
        return cls(sequences, sequences * new_tokens, attended if decodes else 0, 0 if decodes else attended)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Step time as a sum of costs in seconds.

    No cost is negative, so a larger step never takes less time. Raises ConfigError for other values.
    """

    constant_s: float
    """Of every step."""
    sequence_s: float
    """Of each row."""
    token_s: float
    """Of each new token."""
    context_s: float
    """Of each position that a decoding row attends."""
    work_s: float
    """Of each position that a prefill token attends."""

    def __post_init__(self) -> None:
        """Reject costs that are negative or not finite."""
        for name in self.__slots__:
            require_cost(name, getattr(self, name))

    def step_time(self, shape: StepShape) -> float:
        """Seconds for one step of ``shape``."""
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
        """Seconds for many steps at once; the counts are arrays or numbers that broadcast together."""
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

        One step prefills all prompts and samples each first token; the other output_tokens - 1 come from
        one decode step each, which attend prompt_tokens + 1, prompt_tokens + 2 and so on positions.
        """
        decodes = output_tokens - 1
        per_decode = self.constant_s + (self.sequence_s + self.token_s) * sequences
        attended = sequences * sum_of_lengths(prompt_tokens, output_tokens)
        prefill = self.step_time(StepShape.equal_rows(sequences, prompt_tokens, 0))
        return prefill + decodes * per_decode + self.context_s * attended

    def execution_time(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds that a request takes alone: L^ of SeaLLM's Eq. 7, to which latencies are normalised."""
        return self.slice_time(1, prompt_tokens, output_tokens)


def shape_matrix(shapes: Iterable[StepShape]) -> FloatArray:
    """The shapes as rows [sequences, new tokens, decode context, prefill work]."""
    return np.array([astuple(shape) for shape in shapes], dtype=np.float64).reshape(-1, 4)


def sum_of_lengths(prompt_tokens: int, output_tokens: int) -> int:
    """Sum of the lengths l that one row's decode iterations attend: l = L + 1 .. L + S - 1."""
    decodes = output_tokens - 1
    return decodes * prompt_tokens + decodes * output_tokens // 2


def require_cost(name: str, value: float) -> None:
    """Raise ConfigError if ``value`` cannot be a cost."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"latency cost {name} must be a finite number of at least 0, got {value!r}")


def _attended(new_tokens: int, context: int) -> int:
    """Positions that a causal chunk attends, summed over its tokens."""
    return new_tokens * context + new_tokens * (new_tokens + 1) // 2
