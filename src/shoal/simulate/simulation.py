"""The simulation loop: a heap of timed events that drives engines in virtual time."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.fleet_options import FleetOptions
from shoal.cluster.manager.dispatch import DispatchPolicy, PackerDispatch, RoundRobin
from shoal.core import ConfigError, FinishReason, Request, StepPlan, TokenDeadlines
from shoal.core.slo import resolve_slo
from shoal.measure import InterTokenLatencies, RequestRow, RunRecord
from shoal.measure.summary import met_goals
from shoal.schedule import RequestState
from shoal.schedule.slo_expired import refusal_message
from shoal.simulate.fleet import Fleet
from shoal.simulate.lock_step import LockStep, RankBalance
from shoal.simulate.recorder import Recorder
from shoal.simulate.replica import Replica, VirtualClock
from shoal.simulate.sources import Source
from shoal.simulate.spec import Deaths, EngineSpec, MigrationSpec, Watch
from shoal.simulate.tokens_on_time import TokensOnTime

OnPlan = Callable[[int, StepPlan, int, Sequence[int]], None]
"""Called for a finished plan: number of its engine, plan, time of planning, duration of each iteration in ns.
"""


class Simulation:
    """Engines and requests that arrive at them; ``run`` once.

    The cluster manager dispatches requests and restarts dead engines. Simultaneous events happen in a fixed
    order: ends of steps, by engine number; deaths and loads; arrivals; begins of steps. The same input gives
    the same record, byte for byte, with any ``watch``. (Only the totals of an engine that dies may differ by
    its last steps with and without skipping ahead.)

    lock_step: the engines are data-parallel ranks of one group, which step together; see ``RankTimes``.
    Raises ConfigError for no engines, and for a group that cannot be simulated.
    """

    def __init__(
        self,
        engines: Sequence[EngineSpec],
        source: Source,
        *,
        dispatch: DispatchPolicy | PackerDispatch | None = None,
        watch: Watch | None = None,
        on_plan: OnPlan | None = None,
        deaths: Deaths | None = None,
        migrations: MigrationSpec | None = None,
        lock_step: bool = False,
        batching: BatchingOptions | None = None,
        fleet: FleetOptions | None = None,
    ) -> None:
        if not engines:
            raise ConfigError("a simulation needs at least one engine")
        if lock_step:
            _check_ranks(engines, dispatch, deaths, migrations, batching, fleet)
        watch = Watch() if watch is None else watch
        self._clock = VirtualClock()
        self._source = source
        self._watch, self._on_plan = watch, on_plan
        self._rows: list[RequestRow] = []
        self._gaps: dict[str, InterTokenLatencies] = defaultdict(InterTokenLatencies)
        self._on_time = TokensOnTime()
        self._due: list[tuple[int, int]] = []
        self._specs = engines
        self._services = {service for spec in engines for service in spec.services}
        sample_ns = round(watch.sample_s * 1e9)
        self._recorders = [
            Recorder(number, spec.layout.merged_blocks, sample_ns, spans=watch.spans)
            for number, spec in enumerate(engines)
        ]
        self._limited = any(_limited(spec) for spec in engines)
        self._lock_step = LockStep() if lock_step else None
        policy = RankBalance(self._counted) if lock_step else dispatch or RoundRobin()
        self._fleet = Fleet(
            engines,
            policy,
            self._clock,
            self._replica,
            self._refuse,
            deaths or Deaths(),
            migrations or MigrationSpec(),
            lambda number, kind: self._recorders[number].event(kind, self._clock.now_ns),
            batching,
            fleet,
        )

    def _replica(self, number: int) -> Replica:
        def ended(state: RequestState, reason: FinishReason, now_ns: int) -> None:
            if reason is FinishReason.SLICE:
                self._fleet.slice_ended(state)
                return
            on_time = self._on_time.take(state.request.id)
            row = row_of(state, reason, now_ns, number, on_time)
            self._rows.append(row)
            self._fleet.ended(state, reason, met_goals(row))
            self._source.ended(row)

        replica = Replica(
            self._specs[number],
            self._clock,
            self._recorders[number],
            ended,
            skip_ahead=self._watch.skip_ahead,
            on_plan=None if self._on_plan is None else partial(self._on_plan, number),
            lock_step=self._lock_step,
            on_time=self._on_time,
        )
        replica.scheduler.observe_inter_token_latency(lambda service, *gaps: self._gaps[service].add(*gaps))
        return replica

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engines, by number."""
        return self._fleet.replicas

    def run(
        self,
        title: str = "simulation",
        facts: Mapping[str, str] | None = None,
        progress: Callable[[int], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> RunRecord:
        """Simulate until every request has ended, or ``stop`` returns True; then only ended ones are
        recorded.

        progress: called from time to time with the number of ended requests. Raises IntegrityError for an
        inconsistent pool.
        """
        reported = 0
        if self._limited:
            self._fleet.touched.update(range(len(self._specs)))
            self._begin_touched()  # engines fetch weights before the first request
        while not (stopped := stop()) and self._advance():
            if progress is not None and len(self._rows) >= reported + 100:
                reported = len(self._rows)
                progress(reported)
        if progress is not None:
            progress(len(self._rows))
        if stopped:
            ended = f"after {len(self._rows):,} of {self._source.total:,} requests; all figures are of these"
            return self._record(title, {**(facts or {}), "stopped": ended}, stopped=True)
        if len(self._rows) != self._source.total:
            raise RuntimeError(f"{self._source.total - len(self._rows)} requests were never answered")
        return self._record(title, {} if facts is None else facts)

    def _advance(self) -> bool:
        """Simulate the next point in time with events; False: there is none."""
        due, fleet, source = self._due, self._fleet, self._source
        replicas, touched = fleet.replicas, fleet.touched
        while due and replicas[due[0][1]].due_ns != due[0][0]:
            heapq.heappop(due)
        times = [due[0][0]] if due else []
        if source.next_ns is not None:
            times.append(source.next_ns)
        if fleet.next_ns is not None and (times or fleet.unfinished):
            times.append(fleet.next_ns)
        if not times or (self._limited and self._over):
            return False
        now_ns = self._clock.now_ns = min(times)
        while due and due[0][0] == now_ns:
            number = heapq.heappop(due)[1]
            if replicas[number].due_ns == now_ns:
                replicas[number].resume()
                touched.add(number)
        fleet.pass_time()
        # Closed-loop clients may send as soon as a step has ended.
        while (arrival_ns := source.next_ns) is not None and arrival_ns <= now_ns:
            self._arrive(source.take())
        self._begin_touched()
        return True

    @property
    def _over(self) -> bool:
        """Whether only fetches of weights for nobody are left."""
        if self._source.next_ns is not None or self._fleet.unfinished:
            return False
        return not any(replica.stepping for replica in self._fleet.replicas)

    def _begin_touched(self) -> None:
        """Begin steps of engines with new work, and note when they are due."""
        touched = self._fleet.touched
        while touched:
            some = sorted(touched)
            touched.clear()
            for number in self._begin(some):
                due_ns = self._fleet.replicas[number].due_ns
                if due_ns is not None:
                    heapq.heappush(self._due, (due_ns, number))
            self._fleet.emit_ended()

    def _begin(self, touched: Sequence[int]) -> Sequence[int]:
        """Begin steps of touched engines, or of all ranks of a group; returns their numbers."""
        replicas, group = self._fleet.replicas, self._lock_step
        if group is None:
            for number in touched:
                replicas[number].begin()
            return touched
        if group.under_way:
            return ()
        for replica in replicas:
            replica.begin()
        group.start()
        for replica in replicas:
            replica.group_started()
        return range(len(replicas))

    def _counted(self, name: str) -> tuple[int, int]:
        """Present waiting and running requests of an engine."""
        scheduler = self._fleet.replicas[int(name)].scheduler
        return scheduler.waiting, scheduler.running

    def _arrive(self, request: Request) -> None:
        """Submit a request; one of an unknown service is refused."""
        if request.service in self._services:
            self._fleet.submit(request)
        else:
            known = ", ".join(sorted(self._services))
            why = f"model {request.service!r} is not served; possible are {known}"
            self._refuse(request, -1, why)

    def _refuse(self, request: Request, number: int, why: str) -> None:
        now_ns = self._clock.now_ns
        slo = request.slo
        if number >= 0:
            service = self._specs[number].services[request.service]
            slo = resolve_slo(slo, service.slo, service.execution_s)
        row = RequestRow(
            request_id=request.id,
            service=request.service,
            arrival_ns=request.arrival_ns,
            first_token_ns=now_ns,
            finish_ns=now_ns,
            prompt_tokens=len(request.prompt),
            output_tokens=0,
            engine=-1,
            finish=FinishReason.REFUSED.value,
            error=why,
            slo=slo,
        )
        self._rows.append(row)
        self._source.ended(row)

    def _record(self, title: str, facts: Mapping[str, str], *, stopped: bool = False) -> RunRecord:
        end_ns = max(recorder.end_ns for recorder in self._recorders)
        samples, spans, events, totals = [], [], [], []
        for number, (recorder, replica, lost) in enumerate(
            zip(self._recorders, self._fleet.replicas, self._fleet.lost, strict=True)
        ):
            replica.close()
            recorder.close(end_ns)
            samples += recorder.samples
            spans += recorder.spans
            events += recorder.events
            scheduler = replica.scheduler
            up = self._fleet.up(number, max(end_ns, self._clock.now_ns))
            totals.append(recorder.totals([*lost, scheduler.stats()], scheduler.max_running, up))
        samples.sort(key=lambda sample: (sample.time_ns, sample.engine))
        spans.sort(key=lambda span: (span.start_ns, span.engine))
        events.sort(key=lambda event: (event.time_ns, event.engine))
        execution_s = {
            name: service.execution_s
            for spec in self._specs
            for name, service in spec.services.items()
            if service.execution_s is not None
        }
        return RunRecord(
            title=title,
            requests=self._rows,
            samples=samples,
            engines=totals,
            spans=spans,
            execution_s=execution_s,
            inter_token_latencies=self._gaps,
            end_ns=end_ns,
            moves=_count_migrations(self._fleet),
            withdrawn=self._fleet.withdrawn,
            facts=facts,
            stopped=stopped,
            events=events,
        )


def _count_migrations(fleet: Fleet) -> Mapping[str, Mapping[str, int]]:
    moves: dict[str, dict[str, int]] = {}
    for (method, outcome), count in sorted(fleet.migrations.items()):
        moves.setdefault(method.value, {})[outcome.value] = count
    return moves


def _check_ranks(
    engines: Sequence[EngineSpec],
    dispatch: DispatchPolicy | PackerDispatch | None,
    deaths: Deaths | None,
    migrations: MigrationSpec | None,
    batching: BatchingOptions | None,
    fleet: FleetOptions | None,
) -> None:
    """Raise ConfigError for options that a group of ranks does not support."""
    options = engines[0].scheduler
    refused = {
        "all weights to stay": any(_limited(spec) for spec in engines),
        "plans of one iteration (max_iterations)": options.max_iterations > 1,
        "one service": len(engines[0].services) > 1,
        "a dispatch of their own": dispatch is not None,
        "to live": deaths is not None,
        "to keep its requests": migrations is not None,
        "requests that are dispatched one by one": batching is not None,
        "to run all the time": fleet is not None,
    }
    for what, found in refused.items():
        if found:
            raise ConfigError(f"data-parallel ranks step together, and need {what}")


def _limited(spec: EngineSpec) -> bool:
    """Whether weights come and go."""
    return spec.weights.memory_bytes is not None


def row_of(
    state: RequestState, reason: FinishReason, now_ns: int, engine: int, on_time: int | None = None
) -> RequestRow:
    """The record of a request that has ended; on_time: its tokens within their deadlines."""
    has_deadlines = TokenDeadlines.of(state.slo, state.request.arrival_ns) is not None
    return RequestRow(
        request_id=state.request.id,
        service=state.service,
        arrival_ns=state.request.arrival_ns,
        first_token_ns=state.first_token_ns if state.num_generated else now_ns,
        finish_ns=now_ns,
        prompt_tokens=state.num_prompt_tokens,
        output_tokens=state.num_generated,
        engine=engine,
        finish=reason.value,
        error=refusal_message(state, now_ns) if reason is FinishReason.REFUSED else None,
        cached_tokens=state.num_cached_tokens,
        preemptions=state.num_preemptions,
        recomputed_tokens=state.num_recomputed_tokens,
        largest_gap_ns=state.largest_gap_ns,
        slo=state.slo,
        tokens_on_time=on_time if has_deadlines else None,
    )
