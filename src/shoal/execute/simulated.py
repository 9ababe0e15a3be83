"""The executor of simulations: it computes no tokens, only how long they would take."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.core import ANONYMOUS_TOKEN, StepPlan, StepResult
from shoal.forecast import StepRows, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """One service's model in simulation.

    times: how long its steps take. copy_s: seconds to move one of its KV blocks between device and host.
    """

    times: StepTimes
    copy_s: float = 0.0


@dataclass(slots=True)
class _Flight:
    sampled: int
    duration_ns: int
    ends_ns: int


@dataclass(slots=True)
class SimulatedExecutor:
    """Runs plans in virtual time, one after the other.

    clock: nanoseconds of virtual time; a plan starts when it is submitted and those before it have ended.
    watch: told of every plan, when it starts and when it ends.
    """

    models: Mapping[str, SimulatedModel]
    clock: Callable[[], int]
    watch: Callable[[StepPlan, int, int], None]
    _computed: dict[int, int] = field(default_factory=dict)
    _flights: deque[_Flight] = field(default_factory=deque)
    _free_ns: int = 0

    def submit(self, plan: StepPlan) -> None:
        """Start a plan, or queue it behind those in flight."""
        duration_ns = duration(self.models[plan.service].times.step_time(self._rows(plan)))
        duration_ns += self._copying_ns(plan)
        start_ns = max(self.clock(), self._free_ns)
        self._free_ns = start_ns + duration_ns
        self._flights.append(_Flight(len(plan.sampled), duration_ns, self._free_ns))
        self.watch(plan, start_ns, self._free_ns)

    def collect(self) -> StepResult:
        """What the oldest plan in flight produced; to be asked at ``ends_ns``, when it ends."""
        flight = self._flights.popleft()
        return StepResult([ANONYMOUS_TOKEN] * flight.sampled, flight.duration_ns)

    def close(self) -> None:
        """Abandon plans in flight."""
        self._flights.clear()

    @property
    def ends_ns(self) -> int | None:
        """When the oldest plan in flight ends; None where there is none."""
        return self._flights[0].ends_ns if self._flights else None

    def skip(self, sequences: tuple[int, ...], left: tuple[int, ...], steps: int) -> None:
        """Take note of decode steps of ``sequences`` that were not submitted."""
        computed = self._computed
        for number in left:
            del computed[number]
        for number in sequences:
            computed[number] += steps

    def _rows(self, plan: StepPlan) -> StepRows:
        """What the plan computes; remembers how far every sequence has come."""
        computed = self._computed
        for number in plan.left:
            del computed[number]
        for one in plan.joined:
            computed[one.sequence] = one.computed
        decodes = context = 0
        chunks = []
        for number, count in zip(plan.sequences, plan.new_tokens, strict=True):
            before = computed[number]
            computed[number] = before + count
            if count == 1:
                decodes += 1
                context += before + 1
            else:
                chunks.append((count, before))
        return StepRows(decodes, context, tuple(chunks), len(plan.sampled))

    def _copying_ns(self, plan: StepPlan) -> int:
        """Time for KV on its way to the host and back; moves inside the device count as nothing."""
        copies = [copy for copy in (*plan.vacate, *plan.copies) if copy.source_host or copy.target_host]
        return round(sum(self.models[copy.service].copy_s for copy in copies) * 1e9)


def duration(seconds: float) -> int:
    """Nanoseconds of a step, rounded once and at least one."""
    return max(1, round(seconds * 1e9))
