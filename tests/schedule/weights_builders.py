"""Runs of a scheduler whose weights come and go: arrivals, steps and fetches in virtual time."""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from replay_executor import STEP_NS, ReplayExecutor
from schedule_builders import Run

from shoal.core import Arrival, FinishReason, Idle, Request, StepPlan, StepResult
from shoal.schedule import Scheduler, WeightsOptions
from shoal.schedule.policies.residency import FcfsResidency, ResidencyDecision, ResidencyPolicy, Swap
from shoal.schedule.policies.residency.fcfs import by_last_step

FETCH_NS = 10 * STEP_NS
"""Duration of a fetch, unless another is given."""


class Eager:
    """Always swaps: the weights with a step last come last, and anything leaves for them."""

    def decide(self, view, now_ns):
        wanted = [each for each in view.weights.values() if each.num_requests]
        leaving = [each.name for each in view.weights.values()]
        return ResidencyDecision([Swap(name, leaving) for name in by_last_step(wanted)])


class Never:
    """Swaps nothing."""

    def decide(self, view, now_ns):
        return ResidencyDecision()


def memory_for(
    count: int,
    policy: ResidencyPolicy | None = None,
    *,
    quantum_steps: float = 5,
    max_absence_steps: float = 1e6,
) -> WeightsOptions:
    """Memory for ``count`` weights of one byte."""
    return WeightsOptions(
        memory_bytes=count,
        policy=policy or FcfsResidency(),
        quantum_s=quantum_steps * STEP_NS / 1e9,
        max_absence_s=max_absence_steps * STEP_NS / 1e9,
    )


@dataclass
class WeightsRun(Run):
    """Also what happened to weights."""

    fetched: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    first_tokens_ns: dict[str, int] = field(default_factory=dict)
    tokens_ns: dict[str, list[int]] = field(default_factory=dict)
    """Times of the tokens of each request."""
    ends_ns: dict[str, int] = field(default_factory=dict)
    failed_fetches: Counter[str] = field(default_factory=Counter)


class WeightsMachine:
    """Drives a scheduler: the executor runs plans one after another, and fetches weights beside them.

    It asserts what an executor relies on: rows are of resident weights, never more bytes than the budget are
    resident or coming, nothing with rows in flight leaves, pinned weights stay.
    fetch_ns: duration of a fetch by weights. fails: whether the n-th fetch (from 0) fails.
    """

    limit = 200_000
    """Of events in a run."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        fetch_ns: Callable[[str], int] = lambda weights: FETCH_NS,
        fails: Callable[[int], bool] = lambda number: False,
        vocabulary: int | None = 10_000,
    ) -> None:
        self.scheduler = scheduler
        self.run = WeightsRun()
        self.now_ns = 0
        self.executor = ReplayExecutor(scheduler.pool, vocabulary)  # type: ignore[attr-defined]
        self._fetch_ns, self._fails = fetch_ns, fails
        self.resident: set[str] = set()
        self.coming: dict[str, tuple[int, int]] = {}
        """Begin and end of fetches under way."""
        self._flights: deque[tuple[StepPlan, StepResult, int]] = deque()
        self._free_ns = 0
        self._fetches = 0

    def go(self, requests: Iterable[tuple[int, Request]] = (), *, until_ns: int | None = None) -> WeightsRun:
        """Submit each request at its time, and run until all have ended (or until a time)."""
        heap = [(time_ns, number, request) for number, (time_ns, request) in enumerate(requests)]
        heapq.heapify(heap)
        scheduler, turns = self.scheduler, 0
        while turns == 0 or heap or scheduler.unfinished or self._flights or self.coming:
            turns += 1
            assert turns < self.limit, "no end in sight"
            if until_ns is not None and self.now_ns >= until_ns:
                break
            while heap and heap[0][0] <= self.now_ns:
                self._take(scheduler.submit(heapq.heappop(heap)[2], self.now_ns))
            self._arrive()
            idle_ns = self._fill()
            times = [heap[0][0]] if heap else []
            times += [end_ns for _, end_ns in self.coming.values()]
            times += [self._flights[0][2]] if self._flights else []
            times += [] if idle_ns is None else [idle_ns]
            assert times or not scheduler.unfinished, "the scheduler is stuck"
            if not times:
                break
            assert min(times) > self.now_ns or self._flights, "a busy loop"
            self.now_ns = max(self.now_ns, min(times))
            if self._flights and self._flights[0][2] <= self.now_ns:
                self._complete()
            scheduler.pool.check_integrity()  # type: ignore[attr-defined]
        return self.run

    def _arrive(self) -> None:
        for name, (begin_ns, end_ns) in list(self.coming.items()):
            if end_ns > self.now_ns:
                continue
            del self.coming[name]
            failed = self._fails(self._fetches)
            self._fetches += 1
            if not failed:
                self.resident.add(name)
            self.run.failed_fetches[name] += failed
            error = "the disk is gone" if failed else None
            self.scheduler.arrived(Arrival(name, (end_ns - begin_ns) / 1e9, error), self.now_ns)
            self._take(self.scheduler.take_refused())

    def _fill(self) -> int | None:
        """Plan as many steps as may be in flight; returns when to try again."""
        scheduler = self.scheduler
        while len(self._flights) < scheduler.options.max_in_flight:
            plan = scheduler.schedule(self.now_ns)
            self._take(scheduler.take_refused())
            if isinstance(plan, Idle):
                return plan.until_ns
            self._check(plan)
            for name in plan.fetch:
                begin_ns = max([self.now_ns, *[end_ns for _, end_ns in self.coming.values()]])
                self.coming[name] = (begin_ns, begin_ns + self._fetch_ns(name))
            result = self.executor.run(plan)
            start_ns = max(self.now_ns, self._free_ns)
            self._free_ns = start_ns + (result.duration_ns if plan.seq_ids else 0)
            self._flights.append((plan, result, self._free_ns))
            self.run.plans.append(plan)
            if not plan.seq_ids:
                break
        return None

    def _check(self, plan: StepPlan) -> None:
        entries = self.scheduler.weights
        sizes = {name: entry.num_bytes for name, entry in entries.items()}
        flying = {part for flight, _, _ in self._flights for part, _ in flight.rows_by_service() if part}
        for name in plan.evict:
            assert name in self.resident, f"{name} is not resident"
            assert flying.isdisjoint(entries[name].states), f"{name} has rows in flight"
            assert not entries[name].pinned, f"{name} is pinned"
            self.resident.discard(name)
            self.run.evicted.append(name)
        for name in plan.fetch:
            assert name not in self.resident, name
            assert name not in self.coming, name
            self.run.fetched.append(name)
        used = sum(sizes[name] for name in {*self.resident, *self.coming, *plan.fetch})
        budget = self.scheduler.weights_options.memory_bytes
        assert budget is None or used <= budget, "more weights than fit"
        if budget is not None and plan.seq_ids:
            for service, _ in plan.rows_by_service():
                assert any(service in entries[name].states for name in self.resident), f"{service} is absent"

    def _complete(self) -> None:
        plan, result, _ = self._flights.popleft()
        self._take(self.scheduler.update(plan, result, self.now_ns))

    def _take(self, events: Sequence[object]) -> None:
        self.run.take(events)  # type: ignore[arg-type]
        for event in events:
            if event.tokens:  # type: ignore[attr-defined]
                self.run.tokens_ns.setdefault(event.request_id, []).append(self.now_ns)  # type: ignore[attr-defined]
                self.run.first_tokens_ns.setdefault(event.request_id, self.now_ns)  # type: ignore[attr-defined]
            if event.finish is not None:  # type: ignore[attr-defined]
                self.run.ends_ns[event.request_id] = self.now_ns  # type: ignore[attr-defined]


def finished(run: Run) -> set[str]:
    """Requests that ended with a complete output."""
    return {name for name, reason in run.ends.items() if reason in (FinishReason.STOP, FinishReason.LENGTH)}
