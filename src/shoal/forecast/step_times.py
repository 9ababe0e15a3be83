"""How long a step takes, whatever the model of it: the protocol that simulation and forecasts ask."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from shoal.forecast.latency import FloatArray, LatencyModel, StepShape


@dataclass(frozen=True)
class StepRows:
    """What one step of one service's model computes.

    decodes: rows with one new token; decode_context: positions that they attend, summed, the new tokens
    among them. chunks: (new tokens, tokens computed before) of every row of a prompt; a prompt's last token
    alone counts as a decode. sampled: rows whose logits are needed.
    """

    decodes: int
    decode_context: int
    chunks: tuple[tuple[int, int], ...] = ()
    sampled: int = 0

    @cached_property
    def new_tokens(self) -> int:
        """Tokens computed, over all rows."""
        return self.decodes + sum(count for count, _ in self.chunks)

    @property
    def shape(self) -> StepShape:
        """The four counts of a linear model."""
        work = sum(count * before + count * (count + 1) // 2 for count, before in self.chunks)
        return StepShape(self.decodes + len(self.chunks), self.new_tokens, self.decode_context, work)


class StepTimes(Protocol):
    """A model of step time. Pure: the same question has the same answer."""

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step, more than 0."""
        ...

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of ``steps`` steps in which the same ``sequences`` rows decode.

        context: ``decode_context`` of the first; it grows by one per row and step. Equal to the last bit to
        what ``step_time`` says of each step, so that a simulation may skip ahead.
        """
        ...


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Step times of a linear model, as ``shoal profile`` fits it."""

    model: LatencyModel

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step."""
        return self.model.step_time(rows.shape)

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of a run of decode steps."""
        contexts = np.arange(context, context + sequences * steps, sequences, dtype=np.int64)
        return self.model.step_times(sequences, sequences, contexts, 0)
