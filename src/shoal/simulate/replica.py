"""One simulated engine: the real engine, scheduler and block pool around a simulated executor."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.core import ANONYMOUS_TOKEN, FinishReason, Request, StepPlan, StepResult
from shoal.engine import wire
from shoal.engine.core import Engine
from shoal.engine.migration import wire as migration_wire
from shoal.engine.migration.transfer import KVTransfer
from shoal.engine.weights_reports import WeightsReports
from shoal.execute.simulated import SimulatedExecutor, decode_durations
from shoal.kvcache import BlockPool
from shoal.schedule import RequestState, Scheduler
from shoal.schedule.decode_runs import DecodeRun
from shoal.schedule.request_store import OnEnd
from shoal.simulate.lock_step import LockStep
from shoal.simulate.look_ahead import StepsAhead
from shoal.simulate.recorder import EngineLoad, Recorder
from shoal.simulate.spec import EngineSpec
from shoal.simulate.tokens_on_time import TokensOnTime

LONGEST_RUN, SHORTEST_RUN = 512, 64
"""Bounds on steps computed ahead at once: twice as many as were used the last time."""
_RETRY_NS = 1_000_000
"""Delay before an engine that asks to be called again at once."""

OnProgress = Callable[[str], None]
"""Called with the id of an expected request at its first token."""
OnPlan = Callable[[StepPlan, int, Sequence[int]], None]
"""Called for a finished plan: plan, time of planning, duration of each iteration in ns."""


@dataclass(slots=True)
class VirtualClock:
    """Simulated time in nanoseconds."""

    now_ns: int = 0

    def __call__(self) -> int:
        """The time."""
        return self.now_ns


@dataclass(frozen=True, slots=True)
class _Iterations:
    """A plan of several iterations in flight; an arrival may cut it short."""

    plan: StepPlan
    start_ns: int
    load: EngineLoad
    """Meanwhile."""


class Replica:
    """One engine of a simulation.

    clock: the simulation's. on_end: runs for every request that ends. on_plan: called for every plan that is
    over, skipped ones included, but not for one without rows; this costs time. lock_step: the group that it
    is a rank of, whose owner calls ``group_started`` when the group's step has begun. on_time: counts tokens
    within their deadlines.
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
        on_time: TokensOnTime | None = None,
    ) -> None:
        self.spec = spec
        self.recorder = recorder
        self._step_due_ns: int | None = None
        """End of the step under way, or when an idle engine is to be called again."""
        self._noticed_ns = -1
        """Weights that came until then are known."""
        self._clock = clock
        self._on_end, self._on_plan = on_end, on_plan
        self._on_time = TokensOnTime() if on_time is None else on_time
        self._plans_in_flight: deque[tuple[StepPlan, int]] = deque()
        """Plans in flight and their times of planning, for ``on_plan``."""
        self._pool = BlockPool(spec.layout, prefix_caching=spec.prefix_caching)
        swaps = spec.scheduler.preemption_mode == "swap" and spec.host is not None
        host = BlockPool(spec.host, prefix_caching=False) if swaps and spec.host is not None else None
        self.scheduler = Scheduler(
            self._pool, spec.limits, spec.scheduler, host, self._ended, weights=spec.weights
        )
        self.scheduler.observe_transitions(
            lambda _, runs: None if runs else recorder.event("preempted", clock.now_ns)
        )
        self._executor = (
            SimulatedExecutor(spec.models, clock, self._watch, spec.fetch_times)
            if lock_step is None
            else lock_step.executor(spec.models, clock, self._watch)
        )
        depth = spec.scheduler.max_in_flight
        self._engine = Engine(self.scheduler, self._pool, self._executor, depth=depth, clock=clock)
        self._abort_gap_ns = None if spec.abort_gap_s is None else round(spec.abort_gap_s * 1e9)
        # Within a run of steps that is computed at once no request is cancelled.
        self._skips = skip_ahead and lock_step is None and (self._abort_gap_ns is None or depth == 1)
        self._ahead: StepsAhead | None = None
        self._iterations: _Iterations | None = None
        self._look_ahead_steps = SHORTEST_RUN
        self._waiting: Mapping[str, int] | None = None
        """Waiting requests by service to record, if not the present ones."""
        self._expected: dict[str, int] = {}
        """Requests whose next token is to be reported, with their length without it."""
        self._on_progress: OnProgress = _ignore_progress
        self._weights_reports: WeightsReports | None = None

    def connect(self, transfer: KVTransfer, emit: Callable[[wire.FromEngine], None]) -> None:
        """Enable migrations with KV."""
        self._engine.connect(transfer, emit)

    def on_progress(self, callback: OnProgress) -> None:
        """Set the callback for first tokens of expected requests."""
        self._on_progress = callback

    def report_weights(self, send: Callable[[wire.FromEngine], None]) -> None:
        """Report absent weights from the next step on; ``send`` is for one that takes all to be in memory."""
        self._weights_reports = WeightsReports(self._engine, send)

    @property
    def kv_tokens(self) -> dict[str, int]:
        """Tokens that fill the pool, by service."""
        pool = self._pool
        return {name: pool.max_blocks(name) * pool.block_size for name in self.spec.services}

    @property
    def unfinished(self) -> int:
        return self.scheduler.unfinished

    @property
    def stepping(self) -> bool:
        """Whether a plan is in flight, or steps are computed ahead."""
        return self._ahead is not None or self._executor.ends_ns is not None

    @property
    def due_ns(self) -> int | None:
        """When ``resume`` is to be called next; None: not before an event."""
        arrival_ns = self._executor.link.next_arrival_ns(self._noticed_ns)
        if arrival_ns is None or self._step_due_ns is None:
            return self._step_due_ns if arrival_ns is None else arrival_ns
        return min(arrival_ns, self._step_due_ns)

    def submit(self, request: Request) -> None:
        """Submit a request now; raises InvalidRequest if it can never be served."""
        self._engine.submit(request)
        self.interrupt()

    def migrate(self, order: migration_wire.ToEngine) -> None:
        """Execute a migration message, once the step under way has ended."""
        self._engine.migrate(order)
        self.interrupt()

    def expect(self, request: Request) -> None:
        """Report the next token of a request that arrives."""
        self._expected[request.id] = len(request.prompt) + request.num_output_tokens

    def cancel_expected(self, request: str) -> None:
        """Undo ``expect``."""
        self._expected.pop(request, None)

    def detach(self, request: str) -> Request | None:
        """Remove a request, with the output of all finished plans; None: it is not here."""
        self._catch_up()
        self._expected.pop(request, None)
        self.interrupt()
        return self._engine.detach(request)

    def num_tokens(self, request: str) -> int | None:
        """Present length of a request, prompt and output; None: it is not here."""
        count = self.scheduler.num_tokens(request)
        if count is None or self._ahead is None or self.scheduler.table_of(request) is None:
            return count
        return count + self._ahead.ended(self._clock.now_ns)

    def interrupt(self) -> None:
        """New work has arrived, or weights: skipped or repeated iterations end with the step under way."""
        if self._ahead is not None:
            self._ahead.cut(self._clock.now_ns)
            self._step_due_ns = self._ahead.due_ns
        elif self._iterations is not None:
            self._executor.interrupt()
            self._step_due_ns = self._executor.ends_ns

    def resume(self) -> None:
        """Run what is due now."""
        now_ns = self._clock.now_ns
        if self._executor.link.next_arrival_ns(self._noticed_ns) == now_ns:
            self.interrupt()
        self._noticed_ns = now_ns
        if self._step_due_ns != now_ns:
            return
        if self._ahead is not None:
            self._catch_up()
        elif self._executor.ends_ns == now_ns:
            if self._iterations is not None:
                self._note_iterations(self._iterations)
            self._complete()
            self._report_first_tokens()
        self._step_due_ns = None

    def begin(self) -> None:
        """Begin a step if possible, unless one is under way."""
        under_way = self._executor.ends_ns
        if self._ahead is not None or (under_way is not None and under_way == self._step_due_ns):
            return
        if self._may_skip and self._look_ahead():
            return
        self._engine.begin()
        if self._weights_reports is not None:
            self._weights_reports.send()
        self._step_due_ns = self._executor.ends_ns
        if self._step_due_ns is None and self._engine.idle_until_ns is not None:
            self._step_due_ns = max(self._engine.idle_until_ns, self._clock.now_ns + _RETRY_NS)

    def group_started(self) -> None:
        """The group's step has begun, with this rank's part if it has one."""
        self._step_due_ns = self._executor.ends_ns or self._step_due_ns

    def abandon(self, requests: Sequence[str]) -> list[Request]:
        """The engine dies: returns its ``requests``, with the output of all finished plans."""
        self._catch_up()
        detached = [self._engine.detach(request) for request in requests]
        return [request for request in detached if request is not None]

    def close(self) -> None:
        """Check the pool; raises IntegrityError."""
        self._pool.check_integrity()

    def _ended(self, state: RequestState, reason: FinishReason, now_ns: int) -> None:
        self._expected.pop(state.request.id, None)
        self._on_end(state, reason, now_ns)

    def _report_first_tokens(self) -> None:
        for request, tokens in list(self._expected.items()):
            present = self.scheduler.num_tokens(request)
            if present is not None and present > tokens:
                del self._expected[request]
                self._on_progress(request)

    def _complete(self) -> None:
        """Complete the oldest plan in flight."""
        if self._on_plan is not None and self._executor.plan.seq_ids:
            self._on_plan(*self._plans_in_flight.popleft(), self._executor.durations_ns)
        executor = self._executor
        self._on_time.count(self.scheduler.services, executor.plan, executor.iteration_ends_ns)
        self._engine.complete()
        if self._abort_gap_ns is not None:
            self._abort_stalled(self._abort_gap_ns)

    def _abort_stalled(self, gap_ns: int) -> None:
        """Cancel the running requests with a larger inter-token latency."""
        for service in self.scheduler.services.values():
            batch = service.running
            stalled = (batch.largest_gap_ns > gap_ns).nonzero()[0].tolist()
            for request_id in [batch.requests[row].request.id for row in stalled]:
                self._engine.cancel(request_id)

    @property
    def _may_skip(self) -> bool:
        """Whether steps may be skipped: only decodes, and none with an expected request.

        The scheduler must know all weights that have come.
        """
        if not self._skips or self._engine.needs_pause:
            return False
        if self._executor.link.has_arrival(self._clock.now_ns):
            return False
        return all(self.scheduler.table_of(request) is None for request in self._expected)

    def _look_ahead(self) -> bool:
        """Start a run of decodes computed ahead; False: there is none."""
        start_ns, depth = self._clock.now_ns, self._engine.depth
        leading_ns = self._executor.plan_ends_ns
        free_ns = leading_ns[-1] if leading_ns else start_ns
        if len(leading_ns) != depth - 1 or self._executor.free_ns > free_ns:
            return False
        run = self.scheduler.decode_runs.next_run(start_ns, self._look_ahead_steps)
        if run is None:
            return False
        times = self.spec.services[run.service].times
        # Rounded per step, as by the executor.
        durations_ns = decode_durations(times, run.rows, run.context, run.steps)
        if self._abort_gap_ns is not None and self._longest_gap_ns(run, durations_ns) > self._abort_gap_ns:
            return False
        ends_ns = leading_ns + self._executor.link.step_ends_ns(free_ns, durations_ns)
        del ends_ns[len(leading_ns) + run.planned(1 + bisect_left(ends_ns, run.until_ns)) :]
        self._ahead = StepsAhead(
            run,
            start_ns,
            ends_ns,
            depth,
            self.scheduler.waiting_by_service,
            self.scheduler.running_by_service,
        )
        self._step_due_ns = self._ahead.due_ns
        return True

    def _longest_gap_ns(self, run: DecodeRun, durations_ns: Sequence[int]) -> int:
        """The largest inter-token latency of a run of decodes from now on."""
        last_ns = int(self.scheduler.services[run.service].running.last_token_ns.min())
        return max(self._clock.now_ns + durations_ns[0] - last_ns, *durations_ns)

    def _catch_up(self) -> None:
        """Stop looking ahead: account for ended steps, and turn steps planned by now into plans in flight.

        At the end of a step the next one is not planned yet.
        """
        ahead = self._ahead
        if ahead is None:
            return
        now_ns, run, ended = self._clock.now_ns, ahead.run, ahead.ended(self._clock.now_ns)
        over = self._account(ahead)
        self._step_due_ns = None
        at_an_end = ended > 0 and ahead.ends_ns[ended - 1] == now_ns
        planned = ended if at_an_end else min(ended + run.max_iterations, run.steps)
        self._waiting = ahead.waiting
        for first in range(over, planned, run.max_iterations):
            plan, _ = self.scheduler.decode_runs.commit(run, min(run.max_iterations, planned - first))
            self._clock.now_ns = ahead.planned_ns(first)
            self._engine.begin_with(plan)
        self._clock.now_ns, self._waiting = now_ns, None
        self._step_due_ns = None if at_an_end else self._executor.ends_ns

    def _account(self, ahead: StepsAhead) -> int:
        """Account for the ended steps of a run; returns how many of its own steps have ended."""
        self._ahead = None
        now_ns, ended, leading = self._clock.now_ns, ahead.ended(self._clock.now_ns), ahead.depth - 1
        for end_ns in ahead.ends_ns[: min(ended, leading)]:
            self._clock.now_ns = end_ns
            self._complete()
        self._clock.now_ns = now_ns
        steps = max(ended - leading, 0)
        if steps:
            self._account_steps(ahead, steps)
        return steps

    def _account_steps(self, ahead: StepsAhead, steps: int) -> None:
        """Account for the first steps of a run; all plans before it are complete."""
        run, leading = ahead.run, ahead.depth - 1
        # Unused steps cost time, but a run that is too short costs more.
        self._look_ahead_steps = min(max(2 * steps, SHORTEST_RUN), LONGEST_RUN)
        start_ns = ahead.ends_ns[leading - 1] if leading else ahead.start_ns
        ends_ns = ahead.ends_ns[leading : leading + steps]
        plan, growth = self.scheduler.decode_runs.commit(run, run.planned(steps))
        self._executor.skip(plan, steps, ends_ns[-1])
        durations_ns = [end - start for start, end in pairwise([start_ns, *ends_ns])]
        self._on_time.count(self.scheduler.services, plan, ends_ns)
        tokens = [[ANONYMOUS_TOKEN] * run.rows] * steps
        self.scheduler.update(plan, StepResult(tokens, durations_ns), ends_ns[-1])
        if self._on_plan is not None:
            for part in growth.plans(plan, run.max_iterations):
                first = part.number - plan.number
                made_ns = ahead.planned_ns(first)
                self._on_plan(part, made_ns, durations_ns[first : first + part.iterations])
        view = self.spec.layout.services[run.service]
        per_merged, units = view.blocks_per_merged, view.units_per_block
        used = growth.live_blocks(steps, run.max_iterations)
        if per_merged > 1 or units > 1:
            used = [-(-blocks // per_merged) * units for blocks in used]
        # Others hold blocks, too: migrating requests, and those of absent weights.
        load = EngineLoad(ahead.waiting, ahead.running, self._used())
        self.recorder.decodes(run.service, start_ns, ends_ns, load, run.rows, used)

    def _used(self) -> dict[str, int]:
        """Merged blocks in use, by service."""
        pool = self._pool
        return {name: pool.merged_demand(name, pool.live_blocks(name)) for name in self.spec.services}

    def _note_iterations(self, under_way: _Iterations) -> None:
        """Record a finished plan of several iterations."""
        self._iterations = None
        plan, ends_ns = under_way.plan, self._executor.iteration_ends_ns
        load = under_way.load
        used = [load.used[plan.service]] * len(ends_ns)
        self.recorder.decodes(plan.service, under_way.start_ns, ends_ns, load, len(plan.seq_ids), used)

    def _watch(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        waiting = self.scheduler.waiting_by_service if self._waiting is None else self._waiting
        load = EngineLoad(waiting, self.scheduler.running_by_service, self._used())
        if self._on_plan is not None:
            self._plans_in_flight.append((plan, self._clock.now_ns))
        if plan.iterations > 1:
            self._iterations = _Iterations(plan, start_ns, load)
            return
        decodes = plan.new_tokens.count(1)
        self.recorder.step(
            plan.service,
            start_ns,
            end_ns,
            load,
            decodes=decodes,
            prefill_tokens=sum(plan.new_tokens) - decodes,
            tokens=len(plan.sampled),
        )


def _ignore_progress(request: str) -> None:
    """The default callback."""
