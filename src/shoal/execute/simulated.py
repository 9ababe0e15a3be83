"""SimulatedExecutor: runs plans in virtual time, computing no tokens but how long they would take."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from shoal.core import ANONYMOUS_TOKEN, Arrival, StepPlan, StepResult
from shoal.execute.fetch_link import FetchLink, FetchTimes
from shoal.execute.protocol import Interrupted, never
from shoal.forecast import StepRows, StepTimes

HOST_BYTES_PER_S = 16e9
"""Default rate between device and host memory: about PCIe 4 with 16 lanes, as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """The model of a service in a simulation."""

    times: StepTimes
    copy_s: float = 0.0
    """Seconds to copy one of its KV blocks between device and host."""


@dataclass(slots=True)
class _InFlightPlan:
    """A plan that was started, or waits for the one before it; times in virtual nanoseconds."""

    plan: StepPlan
    start_ns: int
    ends_ns: list[int]


class _Progress:
    """Computed tokens of the sequences of one service.

    Steps in which all sequences decode are counted once for all: the computed tokens of a sequence are its
    own count plus the number of such steps.
    """

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}
        self._steps = 0
        self._computed = 0  # sum over all sequences

    def join(self, number: int, computed: int) -> None:
        self._noted[number] = computed - self._steps
        self._computed += computed

    def leave(self, number: int) -> None:
        noted = self._noted.pop(number, None)
        if noted is not None:
            self._computed -= noted + self._steps

    def decoded(self, numbers: tuple[int, ...], steps: int) -> None:
        """Count ``steps`` decode steps of these sequences."""
        self._computed += len(numbers) * steps
        if len(numbers) == len(self._noted):
            self._steps += steps
            return
        for number in numbers:
            self._noted[number] += steps

    def step(
        self, numbers: tuple[int, ...], new_tokens: tuple[int, ...]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Count a step; returns the positions that its decodes attend, and (tokens, computed before) of its
        chunks."""
        decodes, before_steps = new_tokens.count(1), self._steps
        # If all sequences take part and decodes come before chunks, decodes need not be counted one by one.
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
    watch: called for each plan with rows when it is submitted, with its start and its end unless it is
    interrupted. Plans without rows take only the time of their copies. fetch_times: of the weights that plans
    fetch, which come on a link of their own while steps go on.
    """

    models: Mapping[str, SimulatedModel]
    clock: Callable[[], int]
    watch: Callable[[StepPlan, int, int], None]
    fetch_times: FetchTimes = field(default_factory=FetchTimes)
    link: FetchLink = field(init=False)
    """On which weights come."""
    _progress: dict[str, _Progress] = field(init=False)
    _in_flight: deque[_InFlightPlan] = field(default_factory=deque)
    _free_ns: int = 0

    def __post_init__(self) -> None:
        self._progress = {name: _Progress() for name in self.models}
        self.link = FetchLink(self.fetch_times)

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """Start a plan, or queue it behind those in flight.

        ``interrupted`` is not called, as the future is not known yet; see ``interrupt``.
        """
        durations_ns = self._durations_ns(plan)
        if plan.swap_out_copies or plan.copies:
            durations_ns[0] += self._copying_ns(plan)
        self._begin(plan, durations_ns)

    @property
    def free_ns(self) -> int:
        """When all submitted plans and their copies have ended."""
        return self._free_ns

    def _begin(self, plan: StepPlan, durations_ns: Sequence[int]) -> None:
        """Queue a plan and compute when its iterations end."""
        start_ns = max(self.clock(), self._free_ns)
        for weights in plan.fetch:
            self.link.fetch(weights, start_ns)
        ends_ns = self.link.step_ends_ns(start_ns, durations_ns)
        self._free_ns = ends_ns[-1]
        self._in_flight.append(_InFlightPlan(plan, start_ns, ends_ns))
        if plan.seq_ids:
            self.watch(plan, start_ns, self._free_ns)

    def collect(self) -> StepResult:
        """The result of the oldest plan in flight; to be called when it ends, at ``ends_ns``."""
        durations_ns = self.durations_ns
        done = self._in_flight.popleft()
        plan, made = done.plan, len(done.ends_ns)
        if made > 1:
            self._progress[plan.service].decoded(plan.seq_ids, made - 1)
        return StepResult([[ANONYMOUS_TOKEN] * len(plan.sampled)] * made, durations_ns)

    def interrupt(self) -> None:
        """A request or weights arrive: end a plan of several iterations after the current one."""
        if self._in_flight:
            cut_after(self._in_flight[-1].ends_ns, self.clock())
            self._free_ns = self._in_flight[-1].ends_ns[-1]

    def end_after(self, iterations: int) -> None:
        """End the oldest plan, the only one in flight, after this many of its iterations."""
        ends_ns = self._in_flight[0].ends_ns
        del ends_ns[iterations:]
        self._free_ns = ends_ns[-1]

    def add_service(self, service: str, model: SimulatedModel) -> None:
        """Add a service, between two plans."""
        self.models = {**self.models, service: model}
        self._progress[service] = _Progress()

    def remove_service(self, service: str) -> None:
        """Remove a service without sequences, between two plans."""
        self.models = {name: model for name, model in self.models.items() if name != service}
        del self._progress[service]

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """All of them, since no row is postponed."""
        return seq_ids

    def arrivals(self) -> Sequence[Arrival]:
        """Weights that have come by the clock since the last call, in order."""
        return self.link.take(self.clock())

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        """Empty: simulated KV has no bytes."""
        return memoryview(b"")

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        """Check that ``content`` is empty."""
        if content.nbytes:
            raise ValueError(f"simulated blocks have no bytes, not {content.nbytes}")

    def close(self) -> None:
        self._in_flight.clear()

    @property
    def plan(self) -> StepPlan:
        """The oldest plan in flight."""
        return self._in_flight[0].plan

    @property
    def ends_ns(self) -> int | None:
        """When the oldest plan in flight ends; None if there is none."""
        return self._in_flight[0].ends_ns[-1] if self._in_flight else None

    @property
    def plan_ends_ns(self) -> list[int]:
        """When each plan in flight ends, oldest first."""
        return [each.ends_ns[-1] for each in self._in_flight]

    @property
    def durations_ns(self) -> list[int]:
        """Durations of the iterations of the oldest plan in flight."""
        oldest = self._in_flight[0]
        return [end_ns - start_ns for start_ns, end_ns in pairwise([oldest.start_ns, *oldest.ends_ns])]

    @property
    def iteration_ends_ns(self) -> list[int]:
        return self._in_flight[0].ends_ns

    def skip(self, plan: StepPlan, iterations: int, end_ns: int) -> None:
        """Count ``iterations`` of a decode plan that ended at ``end_ns``; no plan may be in flight."""
        self._free_ns = end_ns
        self._drop(plan.left)
        self._progress[plan.service].decoded(plan.seq_ids, iterations)

    def _durations_ns(self, plan: StepPlan) -> list[int]:
        """Durations of the iterations of a plan, without copies."""
        if not plan.seq_ids:
            self._apply_changes(plan)
            return [0]
        rows = self._rows(plan)
        times = self.models[plan.service].times
        if plan.iterations == 1:
            return [duration(times.step_time(rows))]
        return decode_durations(times, rows.decodes, rows.decode_context, plan.iterations)

    def _rows(self, plan: StepPlan) -> StepRows:
        """The rows of the plan; counts their tokens as computed."""
        self._apply_changes(plan)
        context, chunks = 0, []
        for service, rows in plan.rows_by_service():
            attended, own = self._progress[service].step(plan.seq_ids[rows], plan.new_tokens[rows])
            context += attended
            chunks += own
        return StepRows(len(plan.seq_ids) - len(chunks), context, tuple(chunks), len(plan.sampled))

    def _apply_changes(self, plan: StepPlan) -> None:
        """Add joined sequences and drop those that left."""
        self._drop(plan.left)
        for joined in plan.joined:
            self._progress[plan.service].join(joined.seq_id, joined.computed)

    def _drop(self, left: tuple[int, ...]) -> None:
        for number in left:
            for progress in self._progress.values():
                progress.leave(number)

    def _copying_ns(self, plan: StepPlan) -> int:
        """Time of copies between device and host; copies inside the device take no time."""
        copies = [
            copy for copy in (*plan.swap_out_copies, *plan.copies) if copy.source_host or copy.target_host
        ]
        return round(sum(self.models[copy.service].copy_s for copy in copies) * 1e9)


def duration(seconds: float) -> int:
    """A step's time in whole nanoseconds, at least one."""
    return max(1, round(seconds * 1e9))


def decode_durations(times: StepTimes, rows: int, context: int, steps: int) -> list[int]:
    """Durations in nanoseconds of decode steps of ``rows`` sequences; context: positions that the first
    attends."""
    seconds = times.decode_times(rows, context, steps)
    durations_ns: list[int] = np.maximum(1, np.rint(seconds * 1e9)).astype(np.int64).tolist()
    return durations_ns


def cut_after(ends_ns: list[int], now_ns: int, more: int = 0) -> None:
    """Keep iterations that end by ``now_ns``, the current one, and ``more`` after it."""
    del ends_ns[1 + bisect_left(ends_ns, now_ns) + more :]
