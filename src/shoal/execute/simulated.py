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


class _Progress:
    """How far every sequence of one service has come.

    Steps in which all of them decode are counted once for all: what is noted for a sequence, and the number
    of such steps since, make its computed tokens.
    """

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}
        self._steps = 0
        self._computed = 0  # tokens of all of them

    def join(self, number: int, computed: int) -> None:
        self._noted[number] = computed - self._steps
        self._computed += computed

    def leave(self, number: int) -> None:
        noted = self._noted.pop(number, None)
        if noted is not None:
            self._computed -= noted + self._steps

    def decoded(self, numbers: tuple[int, ...], steps: int) -> None:
        """Each of these computed so many tokens, one in a step."""
        self._computed += len(numbers) * steps
        if len(numbers) == len(self._noted):
            self._steps += steps
            return
        for number in numbers:
            self._noted[number] += steps

    def step(
        self, numbers: tuple[int, ...], new_tokens: tuple[int, ...]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Count a step; positions that its decodes attend, and (tokens, computed before) of its chunks."""
        decodes, before_steps = new_tokens.count(1), self._steps
        # Where everybody takes part, and decodes come before all chunks, nobody need look at the decodes.
        together = len(numbers) == len(self._noted) and 1 not in new_tokens[decodes:]
        first = decodes if together else 0
        context = self._computed + decodes if together else 0
        chunks = []
        for number, count in zip(numbers[first:], new_tokens[first:], strict=True):
            before = self._noted[number] + before_steps
            self._noted[number] += count - together
            if count > 1:
                chunks.append((count, before))
            if together:
                context -= before
            elif count == 1:
                context += before + 1
        self._steps += together
        self._computed += sum(new_tokens)
        return context, chunks


@dataclass(slots=True)
class SimulatedExecutor:
    """Runs plans in virtual time, one after the other.

    clock: nanoseconds of virtual time; a plan starts when it is submitted and those before it have ended.
    watch: told of every plan, when it starts and when it ends.
    """

    models: Mapping[str, SimulatedModel]
    clock: Callable[[], int]
    watch: Callable[[StepPlan, int, int], None]
    _progress: dict[str, _Progress] = field(init=False)
    _flights: deque[_Flight] = field(default_factory=deque)
    _free_ns: int = 0

    def __post_init__(self) -> None:
        """Nothing is computed yet."""
        self._progress = {name: _Progress() for name in self.models}

    def submit(self, plan: StepPlan) -> None:
        """Start a plan, or queue it behind those in flight."""
        duration_ns = duration(self.models[plan.service].times.step_time(self._rows(plan)))
        if plan.swap_out_copies or plan.copies:
            duration_ns += self._copying_ns(plan)
        start_ns = max(self.clock(), self._free_ns)
        self._free_ns = start_ns + duration_ns
        self._flights.append(_Flight(len(plan.sampled), duration_ns, self._free_ns))
        self.watch(plan, start_ns, self._free_ns)

    def collect(self) -> StepResult:
        """What the oldest plan in flight produced; to be asked at ``ends_ns``, when it ends."""
        flight = self._flights.popleft()
        return StepResult.of_step([ANONYMOUS_TOKEN] * flight.sampled, flight.duration_ns)

    def close(self) -> None:
        """Abandon plans in flight."""
        self._flights.clear()

    @property
    def ends_ns(self) -> int | None:
        """When the oldest plan in flight ends; None where there is none."""
        return self._flights[0].ends_ns if self._flights else None

    def skip(self, plan: StepPlan) -> None:
        """Take note of a plan of decode steps whose times the caller knows."""
        self._drop(plan.left)
        self._progress[plan.service].decoded(plan.seq_ids, plan.iterations)

    def _rows(self, plan: StepPlan) -> StepRows:
        """What the plan computes; remembers how far every sequence has come."""
        self._drop(plan.left)
        progress = self._progress[plan.service]
        for joined in plan.joined:
            progress.join(joined.seq_id, joined.computed)
        context, chunks = progress.step(plan.seq_ids, plan.new_tokens)
        return StepRows(len(plan.seq_ids) - len(chunks), context, tuple(chunks), len(plan.sampled))

    def _drop(self, left: tuple[int, ...]) -> None:
        for number in left:
            for progress in self._progress.values():
                progress.leave(number)

    def _copying_ns(self, plan: StepPlan) -> int:
        """Time for KV on its way to the host and back; moves inside the device count as nothing."""
        copies = [
            copy for copy in (*plan.swap_out_copies, *plan.copies) if copy.source_host or copy.target_host
        ]
        return round(sum(self.models[copy.service].copy_s for copy in copies) * 1e9)


def duration(seconds: float) -> int:
    """Nanoseconds of a step, rounded once and at least one."""
    return max(1, round(seconds * 1e9))
