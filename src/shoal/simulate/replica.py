"""One engine in virtual time: the real engine, scheduler and pool around a simulated executor."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shoal.core import ANONYMOUS_TOKEN, Request, StepPlan, StepResult
from shoal.engine.core import Engine
from shoal.execute.simulated import SimulatedExecutor, SimulatedModel, cut_behind, decode_durations
from shoal.kvcache import BlockPool
from shoal.schedule import Scheduler, ServiceLimits
from shoal.schedule.decode_runs import DecodeRun
from shoal.schedule.request_store import OnEnd
from shoal.simulate.lock_step import LockStep
from shoal.simulate.recorder import Recorder
from shoal.simulate.spec import EngineSpec

LONGEST_RUN, SHORTEST_RUN = 512, 64
"""Steps that are looked ahead at once: twice as many as came of it last, between these."""
_RETRY_NS = 1_000_000
"""An engine that wants to be asked again at once is asked after this time."""

OnPlan = Callable[[StepPlan, int, Sequence[int]], None]
"""Told of a plan that is over, when it was made, and how long each of its iterations took, in ns."""


@dataclass(slots=True)
class VirtualClock:
    """The time in the simulation, in nanoseconds from its start."""

    now_ns: int = 0

    def __call__(self) -> int:
        """The time."""
        return self.now_ns


@dataclass(slots=True)
class _Ahead:
    """A run of decode steps that lies ahead and is not committed yet: an arrival may cut it short."""

    run: DecodeRun
    """As the scheduler says."""
    start_ns: int
    """When it begins."""
    ends_ns: list[int]
    """When its steps end."""
    waiting: int
    """Requests that wait meanwhile."""


@dataclass(frozen=True, slots=True)
class _Iterations:
    """A plan of several iterations under way: an arrival may cut it short."""

    plan: StepPlan
    """What runs."""
    start_ns: int
    """When it began."""
    waiting: int
    """Requests that wait meanwhile."""
    used: int
    """Merged blocks in use meanwhile."""


class Replica:
    """One engine of a simulation.

    clock: the simulation's. on_end: told of every request that ends. on_plan: told of every plan when it is
    over, also of those that were skipped; asking for them costs time. lock_step: the group that it is a rank
    of, whose owner calls ``joined`` when the group's step has begun. due_ns: when ``resume`` is to be called
    next.
    """

    def __init__(
        self,
        spec: EngineSpec,
        clock: VirtualClock,
        recorder: Recorder,
        on_end: OnEnd,
        *,
        skip_ahead: bool,
        on_plan: OnPlan | None = None,
        lock_step: LockStep | None = None,
    ) -> None:
        self.spec = spec
        self.recorder = recorder
        self.due_ns: int | None = None
        self._clock = clock
        self._on_plan = on_plan
        self._untold: deque[tuple[StepPlan, int]] = deque()
        """Plans in flight, and when they were made, where somebody is to be told."""
        self._pool = BlockPool(spec.layout, prefix_caching=spec.prefix_caching)
        swaps = spec.scheduler.preemption_mode == "swap" and spec.host is not None
        host = BlockPool(spec.host, prefix_caching=False) if swaps and spec.host is not None else None
        self.scheduler = Scheduler(self._pool, _limits(spec), spec.scheduler, host, on_end)
        executor = SimulatedExecutor if lock_step is None else lock_step.executor
        self._executor = executor(_models(spec), clock, self._watch)
        depth = spec.scheduler.depth
        self._engine = Engine(self.scheduler, self._pool, self._executor, depth=depth, clock=clock)
        self._skips = skip_ahead and depth == 1 and lock_step is None
        self._ahead: _Ahead | None = None
        self._iterations: _Iterations | None = None
        self._look_ahead_steps = SHORTEST_RUN

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self.scheduler.unfinished

    def submit(self, request: Request) -> None:
        """A request arrives now; raises InvalidRequest if it can never be served."""
        self._engine.submit(request)
        if self._ahead is not None:
            cut_behind(self._ahead.ends_ns, self._clock.now_ns)
            self.due_ns = self._ahead.ends_ns[-1]
        elif self._iterations is not None:
            self._executor.interrupt()
            self.due_ns = self._executor.ends_ns

    def resume(self) -> None:
        """What was due now happens."""
        now_ns = self._clock.now_ns
        if self._ahead is not None:
            self._account(self._ahead)
        elif self._executor.ends_ns == now_ns:
            if self._iterations is not None:
                self._note_iterations(self._iterations)
            if self._on_plan is not None:
                self._on_plan(*self._untold.popleft(), self._executor.durations_ns)
            self._engine.complete()
        self.due_ns = None

    def begin(self) -> None:
        """Start what can be started, unless a step is under way already."""
        under_way = self._executor.ends_ns
        if self._ahead is not None or (under_way is not None and under_way == self.due_ns):
            return
        if self._skips and self._look_ahead():
            return
        self._engine.begin()
        self.due_ns = self._executor.ends_ns
        if self.due_ns is None and self._engine.idle_until_ns is not None:
            self.due_ns = max(self._engine.idle_until_ns, self._clock.now_ns + _RETRY_NS)

    def joined(self) -> None:
        """The group's step has begun, this rank's part of it too if there is one."""
        self.due_ns = self._executor.ends_ns or self.due_ns

    def abandon(self, requests: Sequence[str]) -> list[Request]:
        """The engine dies now: its ``requests``, with the output of all plans that have ended."""
        if self._ahead is not None:
            done = bisect_right(self._ahead.ends_ns, self._clock.now_ns)
            del self._ahead.ends_ns[done - done % self._ahead.run.max_iterations :]
            if self._ahead.ends_ns:
                self._account(self._ahead)
        detached = [self._engine.detach(request) for request in requests]
        return [request for request in detached if request is not None]

    def close(self) -> None:
        """Prove the pool's state; raises IntegrityError."""
        self._pool.check_integrity()

    def _look_ahead(self) -> bool:
        """Look for a run of decodes that begins now; whether there is one."""
        start_ns = self._clock.now_ns
        run = self.scheduler.decode_run(start_ns, self._look_ahead_steps)
        if run is None:
            return False
        times = self.spec.services[run.service].times
        # Rounded step by step, as the executor rounds each.
        durations_ns = decode_durations(times, run.rows, run.context, run.steps)
        ends_ns = [start_ns + passed_ns for passed_ns in accumulate(durations_ns)]
        del ends_ns[run.planned(1 + bisect_left(ends_ns, run.until_ns)) :]
        self._ahead = _Ahead(run, start_ns, ends_ns, self.scheduler.waiting)
        self.due_ns = ends_ns[-1]
        return True

    def _account(self, ahead: _Ahead) -> None:
        """The run has come to its end."""
        self._ahead = None
        run, start_ns, ends_ns = ahead.run, ahead.start_ns, ahead.ends_ns
        # Steps looked at in vain cost time, but a run too short costs more.
        steps = len(ends_ns)
        self._look_ahead_steps = min(max(2 * steps, SHORTEST_RUN), LONGEST_RUN)
        plan, growth = self.scheduler.commit_run(run, run.planned(steps))
        self._executor.skip(plan, steps)
        durations_ns = [end - start for start, end in pairwise([start_ns, *ends_ns])]
        tokens = [[ANONYMOUS_TOKEN] * run.rows] * steps
        self.scheduler.update(plan, StepResult(tokens, durations_ns), ends_ns[-1])
        if self._on_plan is not None:
            for part in growth.plans(plan, run.max_iterations):
                first = part.number - plan.number
                made_ns = ends_ns[first - 1] if first else start_ns
                self._on_plan(part, made_ns, durations_ns[first : first + part.iterations])
        view = self.spec.layout.services[run.service]
        per_merged, units = view.blocks_per_merged, view.units_per_block
        used = growth.live_blocks(steps, run.max_iterations)
        if per_merged > 1 or units > 1:
            used = [-(-blocks // per_merged) * units for blocks in used]
        self.recorder.decodes(run.service, start_ns, ends_ns, ahead.waiting, run.rows, used)

    def _note_iterations(self, under_way: _Iterations) -> None:
        """A plan of several iterations has come to its end."""
        self._iterations = None
        plan, ends_ns = under_way.plan, self._executor.iteration_ends_ns
        used = [under_way.used] * len(ends_ns)
        self.recorder.decodes(
            plan.service, under_way.start_ns, ends_ns, under_way.waiting, len(plan.seq_ids), used
        )

    def _watch(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        pool = self._pool
        used = sum([pool.merged_demand(name, pool.live_blocks(name)) for name in self.spec.services])
        if self._on_plan is not None:
            self._untold.append((plan, self._clock.now_ns))
        if plan.iterations > 1:
            self._iterations = _Iterations(plan, start_ns, self.scheduler.waiting, used)
            return
        decodes = plan.new_tokens.count(1)
        self.recorder.step(
            plan.service,
            start_ns,
            end_ns,
            waiting=self.scheduler.waiting,
            running=self.scheduler.running,
            used=used,
            decodes=decodes,
            prefill_tokens=sum(plan.new_tokens) - decodes,
            tokens=len(plan.sampled),
        )


def _limits(spec: EngineSpec) -> dict[str, ServiceLimits]:
    return {
        name: ServiceLimits(
            service.context_tokens,
            slo=service.slo,
            execution_s=service.execution_s,
            quota=service.quota,
            weights=service.weights,
        )
        for name, service in spec.services.items()
    }


def _models(spec: EngineSpec) -> dict[str, SimulatedModel]:
    return {
        name: SimulatedModel(
            times=service.times,
            copy_s=spec.layout.services[name].held_block_bytes / spec.host_bytes_per_s,
        )
        for name, service in spec.services.items()
    }
