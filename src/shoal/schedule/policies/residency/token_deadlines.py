"""Residency policy ``token-deadlines`` (Aegaeon): weights whose next token is due first come."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.core import ConfigError
from shoal.schedule.policies.residency.fcfs import absent_with_work, by_last_step
from shoal.schedule.policies.residency.protocol import (
    Place,
    ResidencyDecision,
    ResidencyView,
    Swap,
    WeightsView,
)
from shoal.schedule.running_batch import FloatArray, RequestTable

_NS = 1_000_000_000
_LONGEST_QUANTUM_S = 4.0
_SOONEST_NS = 10_000_000
"""Between two decisions, if nothing happens."""


class _Due(NamedTuple):
    """Deadlines of some weights' requests."""

    next_ns: int
    """Deadline of the next token of one of them, the earliest."""
    used: float
    """Time of a step, as a share of the time in which its tokens have to come; 0: no stream was seen yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDeadlines:
    """Token i of a request is due at arrival + TTFT goal + i x TPOT goal (Aegaeon, SOSP 2025).

    A stream whose tokens came before they were due has slack, and can be away for as long. The absent weights
    whose next deadline is the earliest come; those with the latest leave for them, if it is later than that
    of the weights that come. So waiting prompts are served first come first served, where goals are equal,
    and together with all others for the same weights. Weights without requests leave before all others.

    Weights stay for a quantum q, in which they make the slack for a whole round. In a round of length R each
    weights come once, m weights step in turn, a step takes t, and a token lasts for d, its TPOT goal. A
    quantum has q / (m t) tokens, which have to last for R, so q = R m t / d. All quanta and fetches fill the
    round, sum(q) + sum(fetch) = m R, so R = sum(fetch) / (m (1 - sum(t / d))). With sum(t / d) of 1 or more
    no quantum suffices, and the longest is used, 4 s.

    Aegaeon has engines for prompts and others for decodes; here both are in one order, by deadline.
    """

    ttft_s: float = 10.0
    """Goal for the first token of a request without one."""
    tpot_s: float = 0.1
    """Goal per further token of a request without one."""

    def __post_init__(self) -> None:
        """Raises ConfigError for goals that are not above 0."""
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if not value > 0:
                raise ConfigError(f"weights policy token-deadlines: {name} must be above 0, got {value}")

    def decide(self, view: ResidencyView, now_ns: int) -> ResidencyDecision:
        """A swap for each absent weights with requests, the earliest deadline first."""
        wanted = absent_with_work(view)
        if not wanted:
            return ResidencyDecision()
        with_work = [each for each in view.weights.values() if each.num_requests]
        dues = {each.name: self._due(each.requests()) for each in with_work}
        quanta_ns = _quanta_ns(with_work, dues)
        evictable = [each for each in view.weights.values() if each.evictable]
        idle = by_last_step(each for each in evictable if not each.num_requests)
        busy = [each for each in evictable if each.num_requests]
        over = [each for each in busy if each.since_ns + quanta_ns[each.name] <= now_ns]
        over.sort(key=lambda each: (-dues[each.name].next_ns, each.name))
        swaps = []
        for each in sorted(wanted, key=lambda each: (dues[each.name].next_ns, each.name)):
            later = [other.name for other in over if dues[other.name].next_ns > dues[each.name].next_ns]
            swaps.append(Swap(each.name, [*idle, *later]))
        return ResidencyDecision(swaps, _until_ns(with_work, dues, quanta_ns, now_ns))

    def _due(self, table: RequestTable) -> _Due:
        tpot_s = _or(table.tpot_s, self.tpot_s)
        due_ns = table.arrival_ns + (_or(table.ttft_s, self.ttft_s) + table.num_generated * tpot_s) * _NS
        lasting_ns = float((table.num_generated * tpot_s).sum()) * _NS
        stepped_ns = float(table.service_time_ns[table.num_generated > 0].sum())
        return _Due(round(float(due_ns.min())), stepped_ns / lasting_ns if lasting_ns else 0.0)


def _or(goals: FloatArray, default: float) -> FloatArray:
    return np.where(np.isnan(goals), default, goals)


def _quanta_ns(with_work: Sequence[WeightsView], dues: Mapping[str, _Due]) -> dict[str, int]:
    """The quantum of each weights with requests, by name."""
    free = 1 - sum([dues[each.name].used for each in with_work])
    fetches_s = sum([each.fetch_s for each in with_work])
    # m R, of the docstring.
    round_s = fetches_s / free if free > 0 else math.inf
    quanta_s = {each.name: dues[each.name].used and dues[each.name].used * round_s for each in with_work}
    return {name: round(min(quantum_s, _LONGEST_QUANTUM_S) * _NS) for name, quantum_s in quanta_s.items()}


def _until_ns(
    with_work: Iterable[WeightsView], dues: Mapping[str, _Due], quanta_ns: Mapping[str, int], now_ns: int
) -> int | None:
    """When resident weights may have got enough slack; None: none of them may leave."""
    resident = [each for each in with_work if each.place is Place.RESIDENT and each.evictable_ns is not None]
    nearest_ns = min([dues[each.name].next_ns for each in with_work if each.place is Place.ABSENT])
    times = []
    for each in resident:
        assert each.evictable_ns is not None
        ends_ns = max(each.since_ns + quanta_ns[each.name], each.evictable_ns)
        behind_ns = nearest_ns - dues[each.name].next_ns
        ahead_ns = now_ns + max(_SOONEST_NS, round(behind_ns * len(resident) * (dues[each.name].used or 1)))
        times.append(max(ends_ns, ahead_ns))
    return min(times, default=None)
