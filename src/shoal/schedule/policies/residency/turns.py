"""Residency policy ``turns`` (ours): weights come where that saves more wait than it costs, and in turns."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from shoal.schedule.policies.residency.fcfs import absent_with_work, by_last_step
from shoal.schedule.policies.residency.protocol import (
    Place,
    ResidencyDecision,
    ResidencyView,
    Swap,
    WeightsView,
)

_NS = 1_000_000_000
_SHORTEST_S = 1e-6
"""Times below it count as so much, so that no quotient is infinite."""
_SMALLEST_SHARE = 1e-6
"""Of time, for the same reason."""


class _Work(NamedTuple):
    """The requests of some weights."""

    value: float
    """Their normalised wait per second in which they make no progress: 1 / execution time for each."""
    execution_s: float
    """Until those there have ended, once they step; they are in one batch."""
    turn_s: float
    """How long the weights stay if others want the room; infinite: they stay."""
    absence_s: float
    """How long the weights stay away if others want the room."""
    last_ns: int
    """Last step of the request that has waited for one the longest; before its first, its arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsResidency:
    """Weights come that save more wait than the swap costs; under overload weights take turns.

    Wait is normalised: a second counts 1 / (execution time) for each request that makes no progress, so the
    sum over all requests is what the mean normalised latency (SeaLLM) adds to its least possible value.

    *Gain and cost.* Weights j are resident. They would keep their room for D_j, until their requests have
    ended or their turn is over. Absent weights i need F_i to come and D_i for their requests, of which a
    batch takes as long as one, the execution time. Let w be the sum of 1 / (execution time) over requests. If
    i come now, its requests wait D_j less, and those of j wait F_i + D_i + F_j more, since j have to come
    again. So i come if w_i D_j > w_j (F_i + D_i + F_j). Where no other resident weights have requests, the
    device idles during both fetches, which is added for the requests of all others. Weights without requests
    cost nothing: they leave first, the least recently used before others, and absent weights come at once
    where this makes room, also while the other resident ones still have work.

    *Turns.* Where all weights have requests at all times, nothing ends and comparing two of them does not
    help. Let weights have n requests of execution time L at a time, let s be the share of time in which they
    are resident, and P the period of their turns, so that a turn lasts s P. A request takes 1 / s times as
    long, a first token waits (1 - s)^2 P / 2 on average, and F / P of the time is lost in fetches. Let m be
    what a second of room is worth. The sum of n / s over all weights is least under the limit on memory if
    n / s^2 = m, so s ~ sqrt(n / bytes), at most 1. Then (n / L) (1 - s)^2 P / 2 + m F / P is least if

        P = sqrt(2 F L) / (s (1 - s)),    a turn lasts sqrt(2 F L) / (1 - s),
                                          an absence sqrt(2 F L) / s.

    So turns come at a rate in proportion to sqrt(w / F), the square-root rule of cyclic polling, and their
    length grows with the root of fetch time and work, which bounds the share of time lost in fetches. Weights
    leave for others when their turn and the absence of the others are over.
    """

    def decide(self, view: ResidencyView, now_ns: int) -> ResidencyDecision:
        """A swap for each absent weights with requests, those with the most wait saved per second first."""
        wanted = absent_with_work(view)
        if not wanted:
            return ResidencyDecision()
        works = _works(view)
        stepping = {name for name in works if view.weights[name].place is Place.RESIDENT}
        evictable = [each for each in view.weights.values() if each.evictable]
        idle = by_last_step(each for each in evictable if not each.num_requests)
        busy = [each for each in evictable if each.num_requests]
        room = view.free_bytes + sum([view.weights[name].num_bytes for name in idle])
        swaps = []
        for each in sorted(wanted, key=lambda each: _rank(each, works[each.name], now_ns)):
            contest = _Contest(each, works, stepping, now_ns)
            swaps.append(Swap(each.name, [*idle, *contest.leaving(busy, each.num_bytes - room)]))
        return ResidencyDecision(swaps, _until_ns(view, wanted, works, now_ns))


def _rank(absent: WeightsView, work: _Work, now_ns: int) -> tuple[float, str]:
    """Those with the most wait so far first, by the time that it takes to end it."""
    waited = (now_ns - work.last_ns) * work.value
    return -waited / (absent.fetch_s + work.execution_s), absent.name


class _Contest(NamedTuple):
    """Absent weights, against resident ones with requests."""

    absent: WeightsView
    works: Mapping[str, _Work]
    stepping: Set[str]
    """Resident weights with requests."""
    now_ns: int

    def leaving(self, busy: Iterable[WeightsView], num_bytes: int) -> list[str]:
        """Those of ``busy`` that should leave to make room of ``num_bytes``; none if they are worth more."""
        candidates = sorted(
            busy, key=lambda each: (self.stay_s(each) > 0, self._loss(each) / each.num_bytes, each.name)
        )
        chosen: list[WeightsView] = []
        found = 0
        while found < num_bytes:
            if len(chosen) == len(candidates):
                return []
            found += candidates[len(chosen)].num_bytes
            chosen.append(candidates[len(chosen)])
        names = [each.name for each in chosen]
        staying = [each for each in chosen if self.stay_s(each) > 0]
        if not staying:
            return names
        loss = sum([self._loss(each) for each in staying]) + self._idle_loss(chosen)
        gain = self.works[self.absent.name].value * max([self.stay_s(each) for each in staying])
        return names if gain > loss else []

    def stay_s(self, resident: WeightsView) -> float:
        """How long the resident weights keep their room if no swap pays."""
        over_ns = turn_over_ns(resident, self.absent, self.works)
        return min(self.works[resident.name].execution_s, (over_ns - self.now_ns) / _NS)

    def _idle_loss(self, leaving: Sequence[WeightsView]) -> float:
        """Normalised wait of all other requests while the device has nothing to do but fetch weights."""
        names = {each.name for each in leaving}
        if self.stepping > names:
            return 0.0
        fetches_s = self.absent.fetch_s + sum([each.fetch_s for each in leaving])
        others = [work.value for name, work in self.works.items() if name not in names | {self.absent.name}]
        return fetches_s * sum(others)

    def _loss(self, resident: WeightsView) -> float:
        """Normalised wait that the swap causes for requests of the resident weights."""
        away_s = self.absent.fetch_s + self.works[self.absent.name].execution_s + resident.fetch_s
        return self.works[resident.name].value * away_s


def turn_over_ns(resident: WeightsView, absent: WeightsView, works: Mapping[str, _Work]) -> float:
    """Time from which ``resident`` leave for ``absent`` even though both have requests; may be infinite."""
    return max(_turn_end_ns(resident, works), _absence_end_ns(absent, works))


def _turn_end_ns(resident: WeightsView, works: Mapping[str, _Work]) -> float:
    return resident.since_ns + works[resident.name].turn_s * _NS


def _absence_end_ns(absent: WeightsView, works: Mapping[str, _Work]) -> float:
    work = works[absent.name]
    return work.last_ns + work.absence_s * _NS


def _until_ns(
    view: ResidencyView, wanted: Sequence[WeightsView], works: Mapping[str, _Work], now_ns: int
) -> int | None:
    """The next time at which a turn is over for some absent weights, or at which weights may leave.

    None: no turn ends.
    """
    resident = [each for each in view.weights.values() if each.evictable_ns is not None]
    times: list[float] = [each.evictable_ns for each in resident if each.evictable_ns is not None]
    turns = [_turn_end_ns(each, works) for each in resident if each.num_requests]
    absences = [_absence_end_ns(each, works) for each in wanted]
    next_turn, next_absence = _after(turns, now_ns), _after(absences, now_ns)
    if min(absences) <= now_ns:
        times.append(next_turn)
    if min(turns, default=math.inf) <= now_ns:
        times.append(next_absence)
    times.append(max(next_turn, next_absence))
    until = _after(times, now_ns)
    return math.ceil(until) if math.isfinite(until) else None


def _after(times: Iterable[float], now_ns: int) -> float:
    """The first of these times that is to come; infinite: none is."""
    return min([time for time in times if time > now_ns], default=math.inf)


def _works(view: ResidencyView) -> dict[str, _Work]:
    """Work of all weights with requests, by name."""
    weights = [each for each in view.weights.values() if each.num_requests]
    shares = _shares(view, weights)
    return {each.name: _work(each, shares[each.name]) for each in weights}


def _work(weights: WeightsView, share: float) -> _Work:
    """share: of time in which they should be resident."""
    execution_s = max(weights.execution_s, _SHORTEST_S)
    length_s = math.sqrt(2 * max(weights.fetch_s, _SHORTEST_S) * execution_s)
    return _Work(
        value=weights.num_requests / execution_s,
        execution_s=execution_s,
        turn_s=length_s / (1 - share) if share < 1 else math.inf,
        absence_s=length_s / share,
        last_ns=int(weights.requests().last_scheduled_ns.min()),
    )


def _shares(view: ResidencyView, weights: Iterable[WeightsView]) -> dict[str, float]:
    """Share of time in which weights with requests should be resident, in proportion to the root of their
    number, so that all fit on average; at most 1."""
    pinned = {
        each.name
        for each in view.weights.values()
        if each.place is Place.RESIDENT and each.evictable_ns is None
    }
    there = [each for each in view.weights.values() if each.place is not Place.ABSENT]
    room = float(view.free_bytes + sum([each.num_bytes for each in there if each.name not in pinned]))
    shares = dict.fromkeys(pinned, 1.0)
    roots = {each.name: math.sqrt(each.num_requests / each.num_bytes) for each in weights}
    left = sorted(
        (each for each in weights if each.name not in pinned), key=lambda each: (-roots[each.name], each.name)
    )
    total = sum([each.num_bytes * roots[each.name] for each in left])
    for each in left:
        share = max(_SMALLEST_SHARE, min(1.0, room * roots[each.name] / total))
        shares[each.name] = share
        # Those with the largest share are first, so that what they cannot use is left for the others.
        room -= share * each.num_bytes
        total -= each.num_bytes * roots[each.name]
    return shares
