"""Skip-join multi-level feedback queue (FastServe, as a baseline)."""

from dataclasses import dataclass

from shoal.schedule.policies.orders.by_priority import LONGEST_NS, POWERS, ByPriority, require
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable

_REQUESTS = 2.0**40
"""Between two levels lies room for more requests than are ever submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlfq(ByPriority):
    """Lower levels first, in a level first come first served (FastServe: Wu et al., 2023).

    A request joins the lowest level whose quantum covers its prefill, so that long prompts do not pass
    through levels that they would only use up. It may use the quantum of its level (time of the steps it
    takes part in), then it is on the next: on level k after joining on j until it was served
    ``quantum_s * (2^(k+1) - 2^j)`` in all. On the last level it stays. The level is thereby a function of the
    prompt and its service time; the scheduler's starvation guard stands in for FastServe's promotion.
    """

    quantum_s: float = 0.1
    """Of level 0; every further level has twice the one before."""
    levels: int = 8
    """How many there are."""
    prefill_tokens_per_s: float = 10_000.0
    """How fast prompts are assumed to be computed."""

    def __post_init__(self) -> None:
        """Refuse knobs without meaning; raises ConfigError."""
        require(self.quantum_s >= 1e-9, "mlfq", "quantum_s", "must be at least a nanosecond", self.quantum_s)
        require(self.levels >= 1, "mlfq", "levels", "must be at least 1", self.levels)
        rate = self.prefill_tokens_per_s
        require(rate > 0, "mlfq", "prefill_tokens_per_s", "must be above 0", rate)

    def levels_of(self, table: RequestTable) -> IntArray:
        """Where each is now, from 0 [n]."""
        powers = POWERS[: self.levels]
        quantum_ns = min(round(self.quantum_s * 1e9), LONGEST_NS)
        # Prompt tokens that the quantum of level 0 covers.
        covered = max(1, min(round(self.quantum_s * self.prefill_tokens_per_s), LONGEST_NS))
        # All the way from level 0 it would have used 2^joined - 1 quanta of level 0 before it got here.
        joined = powers.searchsorted((table.num_prompt_tokens - 1) // covered, side="right")
        used = table.service_time_ns // quantum_ns + powers.take(joined, mode="clip")
        return powers[1:].searchsorted(used, side="right")

    def rank(self, request: RequestState, view: ServiceView) -> float:
        """Its level."""
        return int(self.levels_of(RequestTable([request]))[0])

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """By level, then by submission."""
        return self.levels_of(table) * _REQUESTS + table.number
