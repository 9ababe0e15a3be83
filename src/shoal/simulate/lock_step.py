"""Data-parallel ranks that step together, and the dispatch of requests to them."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.cluster.manager.dispatch import DispatchPolicy
from shoal.cluster.manager.engine_load import EngineLoad, UnassignedRequest
from shoal.core import StepPlan
from shoal.execute.protocol import Interrupted, never
from shoal.execute.simulated import SimulatedExecutor, SimulatedModel, duration
from shoal.forecast import StepRows

COUNTED_NS = 100_000_000
"""Interval at which ranks report their request counts."""
WAITING_WEIGHT = 4
"""Weight of a waiting request, in running ones."""


class RankExecutor(SimulatedExecutor):
    """One rank's executor: the oldest submitted plan starts with the group's step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.submitted: deque[tuple[StepPlan, StepRows]] = deque()
        """Plans for the group's next steps."""

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """Queue a plan for a step of the group."""
        self.submitted.append((plan, self._rows(plan)))

    @property
    def copying_ns(self) -> int:
        """Time of the KV copies of the oldest plan from and to the host."""
        return self._copying_ns(self.submitted[0][0]) if self.submitted else 0

    def start(self, group_ns: int) -> None:
        """Begin the oldest plan, if any; group_ns: duration of the step of all ranks."""
        if self.submitted:
            plan, _ = self.submitted.popleft()
            self._begin(plan, [group_ns])


@dataclass(slots=True)
class LockStep:
    """The ranks of one group, whose steps begin and end together."""

    executors: list[RankExecutor] = field(default_factory=list)
    """By rank."""

    def executor(
        self,
        models: Mapping[str, SimulatedModel],
        clock: Callable[[], int],
        watch: Callable[[StepPlan, int, int], None],
    ) -> RankExecutor:
        """Add a rank."""
        executor = RankExecutor(models, clock, watch)
        self.executors.append(executor)
        return executor

    @property
    def under_way(self) -> bool:
        return any(executor.ends_ns is not None for executor in self.executors)

    def start(self) -> None:
        """Begin the group's step with the submitted plans, if any."""
        submitted = [executor.submitted[0] for executor in self.executors if executor.submitted]
        busy = [(plan, rows) for plan, rows in submitted if plan.seq_ids]
        group_ns = 1
        if busy:
            [(plan, first), *rest] = busy
            times = self.executors[0].models[plan.service].times
            rows = replace(first, others=tuple(others for _, others in rest))
            group_ns = duration(times.step_time(rows))
        copying_ns = max((executor.copying_ns for executor in self.executors), default=0)
        for executor in self.executors:
            executor.start(group_ns + copying_ns)


@dataclass(slots=True)
class RankBalance(DispatchPolicy):
    """Dispatches to the ranks of a group as vLLM does: to the least of 4 x waiting + running.

    Counts are up to 100 ms old; each request dispatched since then counts as waiting.
    """

    counted: Callable[[str], tuple[int, int]]
    """Gives the present (waiting, running) requests of a rank by name."""
    reads_prefixes: bool = False
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _next_ns: int = 0

    def choose(self, unassigned: UnassignedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        if unassigned.now_ns >= self._next_ns:
            self._counts = {engine.name: self.counted(engine.name) for engine in engines}
            self._next_ns = unassigned.now_ns - unassigned.now_ns % COUNTED_NS + COUNTED_NS

        def score(engine: EngineLoad) -> int:
            waiting, running = self._counts[engine.name]
            return WAITING_WEIGHT * waiting + running

        chosen = min(engines, key=score)
        waiting, running = self._counts[chosen.name]
        self._counts[chosen.name] = waiting + 1, running
        return chosen
