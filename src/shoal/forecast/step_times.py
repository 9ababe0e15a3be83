"""The interface of all models of step time."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.forecast.latency import FloatArray, LatencyModel, StepShape


@dataclass(frozen=True, slots=True)
class StepRows:
    """What one step of one service's model computes."""

    decodes: int
    """Rows with one new token, also the last token of a prompt."""
    decode_context: int
    """Positions that they attend, summed, including the new tokens."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(new tokens, tokens computed before) of each other row."""
    sampled: int = 0
    """Rows whose logits are needed."""
    others: tuple["StepRows", ...] = ()
    """What other ranks of a data-parallel group compute in the same step."""

    @property
    def computes_prompts(self) -> bool:
        """Whether the step computes a chunk of a prompt, here or on another rank."""
        return bool(self.chunks) or any(other.chunks for other in self.others)

    @property
    def new_tokens(self) -> int:
        """Tokens computed by all rows."""
        return self.decodes + sum(count for count, _ in self.chunks)

    @property
    def shape(self) -> StepShape:
        """The four counts of a linear model."""
        work = sum(count * before + count * (count + 1) // 2 for count, before in self.chunks)
        return StepShape(self.decodes + len(self.chunks), self.new_tokens, self.decode_context, work)


class StepTimes(Protocol):
    """A model of step time; a pure function."""

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step, more than 0."""
        ...

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of ``steps`` steps in which the same ``sequences`` rows decode.

        context: ``decode_context`` of the first; it grows by one per row and step. Results are equal to those
        of ``step_time`` to the last bit, so that a simulation may skip ahead.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScaledTimes:
    """Step times that are all longer or shorter by the same factor."""

    times: StepTimes
    """The times at a factor of 1."""
    factor: float
    """What they are multiplied by."""

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step."""
        return self.factor * self.times.step_time(rows)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of a run of decode steps."""
        return self.factor * self.times.decode_times(sequences, context, steps)


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Step times of a linear model, as ``shoal profile`` fits it."""

    model: LatencyModel
    """The fitted costs."""

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step."""
        return self.model.step_time(rows.shape)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of a run of decode steps."""
        contexts = np.arange(context, context + sequences * steps, sequences, dtype=np.int64)
        return self.model.step_times(sequences, sequences, contexts, 0)
