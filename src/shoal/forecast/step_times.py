"""The interface of step-time models (``StepTimes``), and their input: the rows of a step."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.forecast.latency import FloatArray, LatencyModel, StepShape


@dataclass(frozen=True, slots=True)
class StepRows:
    """The computation of one step of one service."""

    decodes: int
    """Rows with one new token, including the last token of a prompt."""
    decode_context: int
    """Sum of positions that decoding rows attend, including the new tokens."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(new tokens, tokens computed before) of the other rows."""
    sampled: int = 0
    """Rows with logits."""
    others: tuple["StepRows", ...] = ()
    """The same step on the other ranks of a data-parallel group."""

    @property
    def computes_prompts(self) -> bool:
        """Whether the step has a prompt chunk, on this or another rank."""
        return bool(self.chunks) or any(other.chunks for other in self.others)

    @property
    def new_tokens(self) -> int:
        return self.decodes + sum(count for count, _ in self.chunks)

    @property
    def shape(self) -> StepShape:
        """The four counts of the linear model."""
        work = sum(count * before + count * (count + 1) // 2 for count, before in self.chunks)
        return StepShape(self.decodes + len(self.chunks), self.new_tokens, self.decode_context, work)


class StepTimes(Protocol):
    """A model of step time; a pure function."""

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step, more than 0."""
        ...

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of ``steps`` steps in which the same ``sequences`` rows decode.

        context: ``decode_context`` of the first step; it grows by one per row and step. Results are bitwise
        equal to those of ``step_time``, so that a simulation may skip ahead.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScaledTimes:
    """Step times multiplied by a constant factor."""

    times: StepTimes
    factor: float

    def step_time(self, rows: StepRows) -> float:
        return self.factor * self.times.step_time(rows)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        return self.factor * self.times.decode_times(sequences, context, steps)


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Step times of a linear model."""

    model: LatencyModel

    def step_time(self, rows: StepRows) -> float:
        return self.model.step_time(rows.shape)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        contexts = np.arange(context, context + sequences * steps, sequences, dtype=np.int64)
        return self.model.step_times(sequences, sequences, contexts, 0)
