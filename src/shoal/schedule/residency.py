"""Residency: when weights are fetched and which leave for them; the rules that hold for every policy.

1. Pinned weights are fetched first, and never leave. Weights with a step in flight do not leave.
2. Weights that came stay until every request that was there had a step, and every stream a token, at most a
   quantum. Beyond it they stay while KV that requests lost is computed again, which else might never end.
3. A request that starves for absent weights, or a stream without a token for ``max_absence``, demands a
   fetch. Demands come before the proposals of the policy, the longest waiting first; each weights demand once
   per absence. Under overload there is always a demand, and the policy would have no effect; so every other
   fetch is one that it proposes. Weights with requests do not leave for a demand before their turn is over: a
   quantum, or as long as their fetch takes. So a request waits at most for twice as many fetches and turns as
   there are weights before its own.
4. There is at most one fetch at a time. While no request wants absent weights, free memory is filled with new
   ones, in the order of their declaration.
5. A failed fetch is tried again later; after three failures in a row the requests for the weights end.
"""

import sys
from collections.abc import Iterable, Sequence

from shoal.core import Arrival
from shoal.schedule.policies.residency import Place, ResidencyView, Swap, WeightsView
from shoal.schedule.policies.residency.fcfs import by_last_step
from shoal.schedule.preemption import WaitForInFlight, execution_s
from shoal.schedule.request_state import RequestState
from shoal.schedule.request_store import RequestStore
from shoal.schedule.running_batch import RequestTable
from shoal.schedule.service_state import ServiceState
from shoal.schedule.step_tracker import StepTracker
from shoal.schedule.weights import MAX_FAILURES, Weights, WeightsEntry

_NEVER = sys.maxsize
_SOON_NS = 1_000_000
"""Delay of a decision that a policy wants at a time in the past."""


class Residency:
    """Fetches and evicts weights, as the policy of ``weights.options`` and the rules say."""

    def __init__(self, weights: Weights, store: RequestStore, steps: StepTracker) -> None:
        self._weights = weights
        self._store = store
        self._steps = steps
        options = weights.options
        self._policy = options.policy
        self._quantum_ns = round(options.quantum_s * 1e9)
        self._max_absence_ns = round(options.max_absence_s * 1e9)
        self._decided: tuple[int, ...] | None = None
        """What had happened at the last decision."""
        self._until_ns = _NEVER
        """When to decide again."""
        self._demanded = False
        """Whether the newest fetch was demanded."""

    def settled_until(self, now_ns: int) -> int:
        """Time before which no decision is due if nothing happens; ``now_ns``: one is due."""
        weights = self._weights
        if not weights.limited or (weights.coming is not None and not weights.changed):
            return _NEVER
        if weights.changed or self._decided != self._events() or now_ns >= self._until_ns:
            return now_ns
        return self._until_ns

    def decide(self, now_ns: int) -> None:
        """Make the swaps that are due now; the next plan carries them.

        Raises WaitForInFlight if weights that are to leave have rows in a plan in flight.
        """
        if self._weights.changed or self.settled_until(now_ns) > now_ns:
            return
        times = [self._make_swap(now_ns)]
        if self._weights.coming is None:
            times += [entry.retry_ns for entry in self._weights.entries.values() if entry.retry_ns > now_ns]
            times += [due for entry in self._absent() if (due := self._due_ns(entry)) > now_ns]
        self._until_ns = min(times)
        self._decided = self._events()

    def may_owe_step(self, service: str) -> bool:
        """Whether weights may leave once the next step of a service has ended."""
        return self._weights.may_owe_step(service)

    def arrived(self, arrival: Arrival, now_ns: int) -> None:
        """A fetch has ended."""
        entry = self._weights.arrived(arrival, now_ns)
        self._steps.mark_changed(True)
        if entry is not None and entry.num_failures >= MAX_FAILURES:
            message = f"its weights cannot be loaded ({arrival.error})"
            self._store.fail(entry.states, message, now_ns)

    def _events(self) -> tuple[int, ...]:
        """Counts that change with everything that a decision depends on, but time and steps."""
        store = self._store
        return (store.num_queued, store.num_admissions, store.num_ended, self._weights.changes)

    def _make_swap(self, now_ns: int) -> int:
        """Make one swap, if one is wanted and possible; returns when to try again."""
        demands, until_ns = self._demands(now_ns), _NEVER
        with_requests = any(map(_has_requests, self._absent()))
        new = [Swap(entry.name, ()) for entry in self._absent() if not entry.num_fetches]
        if not (demands or with_requests or new):
            return _NEVER
        view = self._view(now_ns)
        proposed: Sequence[Swap] = new
        if with_requests and (not demands or (self._demanded and not demands[0].pinned)):
            decision = self._policy.decide(view, now_ns)
            proposed = decision.swaps
            if decision.until_ns is not None:
                until_ns = decision.until_ns if decision.until_ns > now_ns else now_ns + _SOON_NS
        elif demands:
            proposed = ()
        if any(self._swap(swap, view, now_ns) for swap in proposed):
            self._demanded = False
            return _NEVER
        if demands and self._swap(Swap(demands[0].name, self._leaving(view, now_ns)), view, now_ns):
            self._demanded = True
            return _NEVER
        later = [self._turn_over_ns(each) for each in view.weights.values() if each.evictable_ns is not None]
        return min([until_ns, *[time for time in later if time > now_ns]])

    def _leaving(self, view: ResidencyView, now_ns: int) -> list[str]:
        """Weights that leave for demanded ones, the least recently used first."""
        return by_last_step(
            each
            for each in view.weights.values()
            if each.evictable and (not each.num_requests or self._turn_over_ns(each) <= now_ns)
        )

    def _turn_over_ns(self, weights: WeightsView) -> int:
        """When weights with requests may leave for demanded ones.

        Under overload there is always a demand, and this bounds the share of time that fetches take.
        """
        return weights.since_ns + max(self._quantum_ns, round(weights.fetch_s * 1e9))

    def _swap(self, swap: Swap, view: ResidencyView, now_ns: int) -> bool:
        """Evict and fetch, if that is possible; returns whether it was done."""
        weights = self._weights
        entry = weights.entries.get(swap.fetch)
        if entry is None or entry.place is not Place.ABSENT or now_ns < entry.retry_ns:
            return False
        missing = entry.num_bytes - view.free_bytes
        leaving: list[WeightsEntry] = []
        for name in dict.fromkeys(swap.evict):
            if sum(each.num_bytes for each in leaving) >= missing:
                break
            found = view.weights.get(name)
            if found is not None and found.evictable:
                leaving.append(weights.entries[name])
        for each in leaving[:-1]:  # small ones that are not needed beside those after them
            if sum(other.num_bytes for other in leaving) - each.num_bytes >= missing:
                leaving.remove(each)
        if sum(each.num_bytes for each in leaving) < missing:
            return False
        if any(self._in_flight(each) for each in leaving):
            raise WaitForInFlight
        for each in leaving:
            weights.evict(each, now_ns)
        weights.fetch(entry, now_ns)
        self._steps.mark_changed(True)
        return True

    def _in_flight(self, entry: WeightsEntry) -> bool:
        """Whether a plan in flight has rows of its services."""
        return any(part.plan.service in entry.states for step in self._steps.in_flight for part in step.parts)

    def _entries(self) -> Iterable[WeightsEntry]:
        return self._weights.entries.values()

    def _absent(self) -> list[WeightsEntry]:
        return [entry for entry in self._entries() if entry.place is Place.ABSENT]

    def _demands(self, now_ns: int) -> list[WeightsEntry]:
        """Absent weights that must come before those that the policy proposes, those due first."""
        found = [(self._due_ns(entry), place) for place, entry in enumerate(self._entries())]
        entries = list(self._entries())
        return [
            entries[place]
            for due_ns, place in sorted(found)
            if due_ns <= now_ns and entries[place].place is Place.ABSENT and entries[place].retry_ns <= now_ns
        ]

    def _due_ns(self, entry: WeightsEntry) -> int:
        """When absent weights demand a fetch: pinned ones at once."""
        if entry.pinned:
            return 0
        due, thresholds_ns = [], [self._max_absence_ns]
        for state in entry.states.values():
            waiting = state.waiting.first_to_starve()
            if waiting is not None:
                due.append(state.starvation.due_ns(waiting))
            if waiting is not None or len(state.running):
                thresholds_ns.append(state.starvation.ns)
            if len(state.running):
                due.append(int(state.running.last_scheduled_ns.min()) + self._max_absence_ns)
        if not due:
            return _NEVER
        if not entry.num_evictions:
            return min(due)
        # Under overload all are due, and a turn of each would be as short as possible.
        return max(min(due), entry.since_ns + min(thresholds_ns))

    def _view(self, now_ns: int) -> ResidencyView:
        views = {entry.name: self._weights_view(entry, now_ns) for entry in self._entries()}
        return ResidencyView(views, self._weights.free_bytes)

    def _weights_view(self, entry: WeightsEntry, now_ns: int) -> WeightsView:
        states = list(entry.states.values())
        resident = entry.place is Place.RESIDENT and not entry.pinned
        free_ns = entry.since_ns + self._quantum_ns
        evictable = resident and not self._weights.owes_step(entry, now_ns)
        waiting = [state.waiting[0].arrival_ns for state in states if state.waiting]
        with_requests = [state for state in states if len(state.running) or state.waiting] or states
        return WeightsView(
            name=entry.name,
            num_bytes=entry.num_bytes,
            place=entry.place,
            since_ns=entry.since_ns,
            evictable=evictable,
            evictable_ns=None if not resident else now_ns if evictable else free_ns,
            fetch_s=self._weights.fetch_s(entry),
            num_waiting=sum(len(state.waiting) for state in states),
            num_running=sum(len(state.running) for state in states),
            oldest_ns=min(waiting, default=None),
            last_step_ns=entry.last_step_ns,
            execution_s=sum(map(execution_s, with_requests)) / len(with_requests),
            requests=lambda: _all_requests(states),
        )


def _has_requests(entry: WeightsEntry) -> bool:
    return any(len(state.running) or state.waiting for state in entry.states.values())


def _all_requests(states: Iterable[ServiceState]) -> RequestTable:
    table = RequestTable(())
    waiting: list[RequestState] = []
    for state in states:
        table = table.joined(state.running)
        waiting += state.waiting
    return table.joined(RequestTable(waiting))
