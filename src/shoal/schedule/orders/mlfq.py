"""Skip-join multi-level feedback queue (FastServe, as a baseline)."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.schedule.group import GroupView
from shoal.schedule.orders.by_priority import ByPriority, require
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

    def levels_of(self, requests: Sequence[Tracked]) -> list[int]:
        """Where each is now, from 0."""
        last = self.levels - 1
        quantum_ns = round(self.quantum_s * 1e9)
        # Prompt tokens that the quantum of level 0 covers.
        covered = max(1, round(self.quantum_s * self.prefill_tokens_per_s))
        levels = []
        for one in requests:
            # All the way from level 0 it would have used 2^joined - 1 quanta of level 0 before it got here.
            uncovered = (one.prompt_tokens - 1) // covered
            power = 1 << min(uncovered.bit_length(), last) if uncovered else 1
            level = (one.charged_ns // quantum_ns + power).bit_length() - 1
            levels.append(level if level < last else last)
        return levels

    def rank(self, one: Tracked, group: GroupView) -> float:
        """Its level."""
        return self.levels_of([one])[0]

    def priorities(self, group: GroupView, requests: Sequence[Tracked]) -> Sequence[float]:
        """By level, then by submission."""
        return [
            level * _REQUESTS + one.number
            for level, one in zip(self.levels_of(requests), requests, strict=True)
        ]
