"""Admission policies of Past-Future's authors, as in their public code (github.com/WuSiYu/lightllm-ae)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.forecast import LengthDistribution, LengthHistory
from shoal.forecast.draws import counters, derive_seeds, uniforms
from shoal.schedule import Conservative, PastFuture
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.running_batch import IntArray, RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedLimit(Conservative):
    """Conservative admission with an assumed output limit that may differ from the true one."""

    assumed: int
    """Output tokens reserved for each request; more once it has generated more."""

    def reserved_tokens(self, table: RequestTable) -> IntArray:
        return np.maximum(table.num_prompt_tokens + self.assumed, table.num_tokens_with_in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneAtATime(AssumedLimit):
    """The authors' conservative server: at most one request is admitted at a time."""

    stays_rejected: ClassVar[bool] = False

    def how_many_fit(
        self,
        running: MemoryForecast,
        candidates: RequestTable,
        others: Sequence[MemoryForecast],
        capacity: int,
    ) -> int:
        if np.count_nonzero(running.table.seq_id < 0):  # one was admitted to this step
            return 0
        return min(1, AssumedLimit.how_many_fit(self, running, candidates, others, capacity))


class PublishedHistory(LengthHistory):
    """A history of output lengths that starts half full of ``initial``, and is used before it is full."""

    def __init__(self, initial: int, window: int) -> None:
        super().__init__(initial, window)
        for _ in range(window // 2):
            self.record(initial)

    @property
    def censors(self) -> bool:
        return False

    def distribution(self, generated: IntArray) -> LengthDistribution:
        lengths = self._ascending()
        return LengthDistribution(lengths, np.arange(len(lengths) + 1) / len(lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPastFuture(PastFuture):
    """Past-Future as its authors published it.

    M* is the largest of 5 draws (fewer for more than 50 requests). A waiting request's output is one of the
    history's lengths; a preempted one's is as much longer than what it has generated. A running request's is
    interpolated between two neighbours of: what it has generated, the greater lengths of the history, the
    limit. Waiting requests are drawn again at every look.
    """

    draws: str = "max"
    initial: int = 512
    """The history starts half full of this length."""

    def new_history(self, maximum: int) -> LengthHistory:
        return PublishedHistory(self.initial, self.window)

    def estimate(self, table: RequestTable, lengths: LengthDistribution, samples: int) -> IntArray:
        """Drawn lengths; those of waiting requests depend on the progress of all."""
        generated = table.num_tokens_with_in_flight - table.num_prompt_tokens
        look = derive_seeds(table.seeds, np.array([generated.sum()]))
        drawn = uniforms(derive_seeds(look, counters(samples)))
        history = lengths.lengths
        chosen = history[(drawn * len(history)).astype(np.int64)] + generated
        return np.where(
            table.seq_id < 0, chosen, _interpolated(history, generated, table.max_new_tokens, drawn)
        )


def _interpolated(history: IntArray, generated: IntArray, limit: IntArray, drawn: np.ndarray) -> IntArray:
    """Lengths at ``drawn`` [samples, n], 0 to 1, of the way from ``generated`` to ``limit`` [n] over the
    sorted ``history``'s greater lengths."""
    shorter = history.searchsorted(generated, side="right")
    way = drawn * (len(history) - shorter + 1)
    passed = way.astype(np.int64)
    ends = np.maximum(limit, history[-1])
    after = shorter + passed
    left = np.where(passed > 0, history[np.maximum(after, 1) - 1], generated)
    right = np.where(after < len(history), history[np.minimum(after, len(history) - 1)], ends)
    lengths: IntArray = np.rint(left + (right - left) * (way - passed)).astype(np.int64)
    return lengths
