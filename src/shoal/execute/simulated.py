"""The executor of simulations: it computes no tokens, only how long they would take."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from shoal.core import ANONYMOUS_TOKEN, StepPlan, StepResult
from shoal.execute.protocol import Interrupted, never
from shoal.forecast import StepRows, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """One service's model in simulation."""

    times: StepTimes
    """How long its steps take."""
    copy_s: float = 0.0
    """Seconds to move one of its KV blocks between device and host."""


@dataclass(slots=True)
class _InFlightPlan:
    """A plan that was started, or waits for the one before it."""

    plan: StepPlan
    """What is computed."""
    start_ns: int
    """When it starts."""
    ends_ns: list[int]
    """When its iterations end."""


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
    watch: told of every plan with rows when it is submitted, when it starts, and when it ends unless it is
    interrupted. Plans without rows take only the time of what they copy.
    """

    models: Mapping[str, SimulatedModel]
    clock: Callable[[], int]
    watch: Callable[[StepPlan, int, int], None]
    _progress: dict[str, _Progress] = field(init=False)
    _in_flight: deque[_InFlightPlan] = field(default_factory=deque)
    _free_ns: int = 0

    def __post_init__(self) -> None:
        """Nothing is computed yet."""
        self._progress = {name: _Progress() for name in self.models}

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """Start a plan, or queue it behind those in flight.

        What will wait cannot be asked before its time, so ``interrupted`` is not: see ``interrupt``.
        """
        durations_ns = self._durations_ns(plan)
        if plan.swap_out_copies or plan.copies:
            durations_ns[0] += self._copying_ns(plan)
        self._begin(plan, durations_ns)

    @property
    def free_ns(self) -> int:
        """When the plans so far have ended, or what they copy."""
        return self._free_ns

    def _begin(self, plan: StepPlan, durations_ns: Sequence[int]) -> None:
        """Note when the iterations of a plan end, which start when those before it have ended."""
        start_ns = max(self.clock(), self._free_ns)
        ends_ns = [start_ns + passed_ns for passed_ns in accumulate(durations_ns)]
        self._free_ns = ends_ns[-1]
        self._in_flight.append(_InFlightPlan(plan, start_ns, ends_ns))
        if plan.seq_ids:
            self.watch(plan, start_ns, self._free_ns)

    def collect(self) -> StepResult:
        """What the oldest plan in flight produced; to be asked at ``ends_ns``, when it ends."""
        durations_ns = self.durations_ns
        done = self._in_flight.popleft()
        plan, made = done.plan, len(done.ends_ns)
        if made > 1:
            self._progress[plan.service].decoded(plan.seq_ids, made - 1)
        return StepResult([[ANONYMOUS_TOKEN] * len(plan.sampled)] * made, durations_ns)

    def interrupt(self) -> None:
        """Somebody arrives: of a plan of several iterations the one under way is the last."""
        if self._in_flight:
            cut_behind(self._in_flight[-1].ends_ns, self.clock())
            self._free_ns = self._in_flight[-1].ends_ns[-1]

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """All of them: no row is postponed."""
        return seq_ids

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        """Nothing: what is not computed has no bytes."""
        return memoryview(b"")

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        """Nothing is written."""
        if content.nbytes:
            raise ValueError(f"simulated blocks have no bytes, not {content.nbytes}")

    def close(self) -> None:
        """Abandon plans in flight."""
        self._in_flight.clear()

    @property
    def ends_ns(self) -> int | None:
        """When the oldest plan in flight ends; None where there is none."""
        return self._in_flight[0].ends_ns[-1] if self._in_flight else None

    @property
    def plan_ends_ns(self) -> list[int]:
        """When each of the plans in flight ends, the oldest first."""
        return [each.ends_ns[-1] for each in self._in_flight]

    @property
    def durations_ns(self) -> list[int]:
        """How long the iterations of the oldest plan in flight take."""
        oldest = self._in_flight[0]
        return [end_ns - start_ns for start_ns, end_ns in pairwise([oldest.start_ns, *oldest.ends_ns])]

    @property
    def iteration_ends_ns(self) -> list[int]:
        """When the iterations of the oldest plan in flight end."""
        return self._in_flight[0].ends_ns

    def skip(self, plan: StepPlan, iterations: int, end_ns: int) -> None:
        """Take note of a plan of decode steps, and of how many were made by when; no plan is in flight."""
        self._free_ns = end_ns
        self._drop(plan.left)
        self._progress[plan.service].decoded(plan.seq_ids, iterations)

    def _durations_ns(self, plan: StepPlan) -> list[int]:
        """Of each iteration of a plan, copies apart."""
        if not plan.seq_ids:
            self._note_changes(plan)
            return [0]
        rows = self._rows(plan)
        times = self.models[plan.service].times
        if plan.iterations == 1:
            return [duration(times.step_time(rows))]
        return decode_durations(times, rows.decodes, rows.decode_context, plan.iterations)

    def _rows(self, plan: StepPlan) -> StepRows:
        """What the plan computes; remembers how far every sequence has come."""
        self._note_changes(plan)
        context, chunks = 0, []
        for service, rows in plan.rows_by_service():
            attended, own = self._progress[service].step(plan.seq_ids[rows], plan.new_tokens[rows])
            context += attended
            chunks += own
        return StepRows(len(plan.seq_ids) - len(chunks), context, tuple(chunks), len(plan.sampled))

    def _note_changes(self, plan: StepPlan) -> None:
        """Who came and who left."""
        self._drop(plan.left)
        for joined in plan.joined:
            self._progress[plan.service].join(joined.seq_id, joined.computed)

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


def decode_durations(times: StepTimes, rows: int, context: int, steps: int) -> list[int]:
    """The same of steps in which ``rows`` sequences decode; context: positions that the first attends."""
    seconds = times.decode_times(rows, context, steps)
    durations_ns: list[int] = np.maximum(1, np.rint(seconds * 1e9)).astype(np.int64).tolist()
    return durations_ns


def cut_behind(ends_ns: list[int], now_ns: int, more: int = 0) -> None:
    """Leave only iterations that end by ``now_ns``, the one under way then, and so many ``more``."""
    del ends_ns[1 + bisect_left(ends_ns, now_ns) + more :]
