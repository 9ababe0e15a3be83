"""Order ``mlfq``: skip-join multi-level feedback queue (FastServe, as a baseline)."""

from dataclasses import dataclass

from shoal.schedule.policies.orders.by_priority import LONGEST_NS, POWERS, ByPriority, require
from shoal.schedule.policies.view import ServiceView
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import FloatArray, IntArray, RequestTable

_REQUESTS = 2.0**40
"""Distance of the keys of two levels: more than the number of requests ever submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlfq(ByPriority):
    """Lower levels first, first come first served inside a level (FastServe: Wu et al., 2023).

    A request joins the lowest level whose quantum covers its prefill, so that long prompts skip levels that
    they would only use up. After the quantum of its level (time of the steps it takes part in) it is demoted
    to the next: having joined on level j, it is on level k until a service time of ``quantum_s * (2^(k+1) -
    2^j)``. It stays on the last level. So the level is a function of the prompt and the service time; the
    scheduler's starvation guard replaces FastServe's promotion.
    """

    quantum_s: float = 0.1
    """Of level 0; every further level has twice the quantum of the one before."""
    levels: int = 8
    prefill_tokens_per_s: float = 10_000.0
    """Assumed speed of prefill."""

    def __post_init__(self) -> None:
        require(self.quantum_s >= 1e-9, "mlfq", "quantum_s", "must be at least a nanosecond", self.quantum_s)
        require(self.levels >= 1, "mlfq", "levels", "must be at least 1", self.levels)
        rate = self.prefill_tokens_per_s
        require(rate > 0, "mlfq", "prefill_tokens_per_s", "must be above 0", rate)

    def levels_of(self, table: RequestTable) -> IntArray:
        """Current level of each request, from 0 [n]."""
        powers = POWERS[: self.levels]
        quantum_ns = min(round(self.quantum_s * 1e9), LONGEST_NS)
        # Prompt tokens covered by the quantum of level 0.
        covered = max(1, min(round(self.quantum_s * self.prefill_tokens_per_s), LONGEST_NS))
        # Starting from level 0, it would have used 2^joined - 1 quanta of level 0 before this level.
        joined = powers.searchsorted((table.num_prompt_tokens - 1) // covered, side="right")
        used = table.service_time_ns // quantum_ns + powers.take(joined, mode="clip")
        return powers[1:].searchsorted(used, side="right")

    def rank(self, request: RequestState, view: ServiceView) -> float:
        return int(self.levels_of(RequestTable([request]))[0])

    def keys(self, view: ServiceView, table: RequestTable) -> FloatArray:
        """By level, then by submission."""
        return self.levels_of(table) * _REQUESTS + table.number
