"""Data-parallel ranks that step together, and how requests are dealt to them."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.cluster.manager.dispatch import DispatchPolicy
from shoal.cluster.manager.engine_load import EngineLoad, Newcomer
from shoal.core import StepPlan
from shoal.execute.protocol import Interrupted, never
from shoal.execute.simulated import SimulatedExecutor, SimulatedModel, duration
from shoal.forecast import StepRows

COUNTED_NS = 100_000_000
"""How often ranks tell how many requests they have."""
WAITING_WEIGHT = 4
"""A waiting request counts as much as so many that run."""


class RankExecutor(SimulatedExecutor):
    """One rank's executor: of the plans that are submitted the oldest starts when the group's step does."""

    def __post_init__(self) -> None:
        """Nothing is submitted yet."""
        super().__post_init__()
        self.submitted: deque[tuple[StepPlan, StepRows]] = deque()
        """What this rank brings to the group's next steps."""

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """Keep a plan for a step of the group."""
        self.submitted.append((plan, self._rows(plan)))

    @property
    def copying_ns(self) -> int:
        """Time for the KV that the oldest plan copies from and to the host."""
        return self._copying_ns(self.submitted[0][0]) if self.submitted else 0

    def start(self, group_ns: int) -> None:
        """Begin the oldest plan, if there is any; group_ns: what the step of all ranks takes."""
        if self.submitted:
            plan, _ = self.submitted.popleft()
            self._begin(plan, [group_ns])


@dataclass(slots=True)
class LockStep:
    """The ranks of one group, whose steps begin and end together; a rank without requests runs along."""

    executors: list[RankExecutor] = field(default_factory=list)
    """Of every rank, by its number."""

    def executor(
        self,
        models: Mapping[str, SimulatedModel],
        clock: Callable[[], int],
        watch: Callable[[StepPlan, int, int], None],
    ) -> RankExecutor:
        """The executor of one more rank."""
        executor = RankExecutor(models, clock, watch)
        self.executors.append(executor)
        return executor

    @property
    def under_way(self) -> bool:
        """Whether a step is being computed."""
        return any(executor.ends_ns is not None for executor in self.executors)

    def start(self) -> None:
        """Begin the group's step with what its ranks have submitted, if any has."""
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
    """Deals requests to the ranks of a group as vLLM does: to the least of 4 x waiting + running.

    Counts are those of up to 100 ms ago, with every request that was dealt since as one more that waits.
    """

    counted: Callable[[str], tuple[int, int]]
    """Waiting and running requests of a rank, by its name, now."""
    reads_prefixes: bool = False
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _next_ns: int = 0

    def choose(self, newcomer: Newcomer, engines: Sequence[EngineLoad]) -> EngineLoad:
        """The rank with the fewest, the first of equals."""
        if newcomer.now_ns >= self._next_ns:
            self._counts = {engine.name: self.counted(engine.name) for engine in engines}
            self._next_ns = newcomer.now_ns - newcomer.now_ns % COUNTED_NS + COUNTED_NS

        def score(engine: EngineLoad) -> int:
            waiting, running = self._counts[engine.name]
            return WAITING_WEIGHT * waiting + running

        chosen = min(engines, key=score)
        waiting, running = self._counts[chosen.name]
        self._counts[chosen.name] = waiting + 1, running
        return chosen
