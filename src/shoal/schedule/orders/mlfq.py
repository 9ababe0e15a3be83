"""Skip-join multi-level feedback queue (FastServe, as a baseline)."""

from dataclasses import dataclass

from shoal.schedule.columns import Columns
from shoal.schedule.group import GroupView
from shoal.schedule.members import IntArray
from shoal.schedule.orders.by_priority import LONGEST_NS, POWERS, ByPriority, FloatArray, require
from shoal.schedule.tracked import Tracked

_REQUESTS = 2.0**40
"""Between two levels lies room for more requests than are ever submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlfq(ByPriority):
    """Lower levels first, in a level first come first served (FastServe: Wu et al., 2023).

    A request joins the lowest level whose quantum covers its prefill, so that long prompts do not pass
    through levels that they would only use up. It may use the quantum of its level (time of the steps it
    takes part in), then it is on the next: on level k after joining on j until it was charged
    ``quantum_s * (2^(k+1) - 2^j)`` in all. On the last level it stays. The level is thereby a function of the
    prompt and the time charged; the scheduler's starvation guard stands in for FastServe's promotion.

    quantum_s: of level 0; every further level has twice the one before. levels: how many there are.
    prefill_tokens_per_s: how fast prompts are believed to be computed.
    """

    quantum_s: float = 0.1
    levels: int = 8
    prefill_tokens_per_s: float = 10_000.0

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        require(self.quantum_s >= 1e-9, "mlfq", "quantum_s", "must be at least a nanosecond", self.quantum_s)
        require(self.levels >= 1, "mlfq", "levels", "must be at least 1", self.levels)
        rate = self.prefill_tokens_per_s
        require(rate > 0, "mlfq", "prefill_tokens_per_s", "must be above 0", rate)

    def levels_of(self, columns: Columns) -> IntArray:
        """Where each is now, from 0 [n]."""
        powers = POWERS[: self.levels]
        quantum_ns = min(round(self.quantum_s * 1e9), LONGEST_NS)
        # Prompt tokens that the quantum of level 0 covers.
        covered = max(1, min(round(self.quantum_s * self.prefill_tokens_per_s), LONGEST_NS))
        # All the way from level 0 it would have used 2^joined - 1 quanta of level 0 before it got here.
        joined = powers.searchsorted((columns.prompt_tokens - 1) // covered, side="right")
        used = columns.charged_ns // quantum_ns + powers.take(joined, mode="clip")
        return powers[1:].searchsorted(used, side="right")

    def rank(self, one: Tracked, group: GroupView) -> float:
        """Its level."""
        return int(self.levels_of(Columns.of([one]))[0])

    def urgencies(self, group: GroupView, columns: Columns) -> FloatArray:
        """By level, then by submission."""
        return self.levels_of(columns) * _REQUESTS + columns.numbers
