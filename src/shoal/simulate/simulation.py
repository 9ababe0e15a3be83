"""The simulation: a heap of timed events that drives engines in virtual time."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shoal.core import ConfigError, FinishReason, InvalidRequest, Request, StepPlan
from shoal.core.slo import resolve_slo
from shoal.measure import RequestRow, RunRecord, TokenGaps
from shoal.schedule import RequestState
from shoal.schedule.hopeless import why_refused
from shoal.simulate.dispatch import Dispatch, EngineView, RoundRobinDispatch
from shoal.simulate.recorder import Recorder
from shoal.simulate.replica import Replica, VirtualClock
from shoal.simulate.sources import Source
from shoal.simulate.spec import EngineSpec, Watch

OnPlan = Callable[[int, StepPlan, int, Sequence[int]], None]
"""Told of a plan that is over: the number of its engine, the plan, when it was made, and how long each of its
iterations took, in ns; what ``describe`` takes, but for the number."""


class Simulation:
    """Engines, and requests that arrive at them; ``run`` once.

    Events at the same time happen in a fixed order: steps end, by the number of their engine; then requests
    arrive; then engines begin. The same input leads to the same record, byte for byte, whatever ``watch``
    says about how to get there. Raises ConfigError for no engines.
    """

    def __init__(
        self,
        engines: Sequence[EngineSpec],
        source: Source,
        *,
        dispatch: Dispatch | None = None,
        watch: Watch | None = None,
        on_plan: OnPlan | None = None,
    ) -> None:
        if not engines:
            raise ConfigError("a simulation needs at least one engine")
        watch = Watch() if watch is None else watch
        self._clock = VirtualClock()
        self._source = source
        self._dispatch = RoundRobinDispatch() if dispatch is None else dispatch
        self._rows: list[RequestRow] = []
        self._gaps: dict[str, TokenGaps] = defaultdict(TokenGaps)
        self._dispatched: Counter[str] = Counter()
        self._due: list[tuple[int, int]] = []
        self._replicas = [self._replica(number, spec, watch, on_plan) for number, spec in enumerate(engines)]
        self._hosts: dict[str, list[int]] = {}
        for number, spec in enumerate(engines):
            for service in spec.services:
                self._hosts.setdefault(service, []).append(number)

    def _replica(self, number: int, spec: EngineSpec, watch: Watch, on_plan: OnPlan | None) -> Replica:
        recorder = Recorder(number, spec.layout.merged_blocks, round(watch.sample_s * 1e9), spans=watch.spans)

        def ended(state: RequestState, reason: FinishReason, now_ns: int) -> None:
            self._rows.append(_row(state, reason, now_ns, number))
            self._source.ended(state.request.id, now_ns)

        replica = Replica(
            spec,
            self._clock,
            recorder,
            ended,
            skip_ahead=watch.skip_ahead,
            on_plan=None if on_plan is None else partial(on_plan, number),
        )
        replica.scheduler.tell_gaps(lambda service, *gaps: self._gaps[service].add(*gaps))
        return replica

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engines, by number."""
        return self._replicas

    def run(
        self,
        title: str = "simulation",
        facts: Mapping[str, str] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> RunRecord:
        """Simulate until every request has ended.

        progress: told now and then how many have. Raises IntegrityError where a pool's state is off.
        """
        told = 0
        while self._advance():
            if progress is not None and len(self._rows) >= told + 100:
                told = len(self._rows)
                progress(told)
        if progress is not None:
            progress(len(self._rows))
        if len(self._rows) != self._source.total:
            raise RuntimeError(f"{self._source.total - len(self._rows)} requests were never answered")
        return self._record(title, {} if facts is None else facts)

    def _advance(self) -> bool:
        """All that happens at the next moment at which anything does; False: nothing ever will."""
        due, replicas, source = self._due, self._replicas, self._source
        while due and replicas[due[0][1]].due_ns != due[0][0]:
            heapq.heappop(due)
        arrival_ns = source.next_ns
        if arrival_ns is None and not due:
            return False
        now_ns = due[0][0] if arrival_ns is None else arrival_ns if not due else min(arrival_ns, due[0][0])
        self._clock.now_ns = now_ns
        touched = set()
        while due and due[0][0] == now_ns:
            number = heapq.heappop(due)[1]
            if replicas[number].due_ns == now_ns:
                replicas[number].resume()
                touched.add(number)
        # Who waits for answers may ask as soon as a step has ended.
        while (arrival_ns := source.next_ns) is not None and arrival_ns <= now_ns:
            host = self._arrive(source.take())
            if host is not None:
                touched.add(host)
        for number in sorted(touched):
            replica = replicas[number]
            replica.begin()
            if replica.due_ns is not None:
                heapq.heappush(due, (replica.due_ns, number))
        return True

    def _arrive(self, request: Request) -> int | None:
        """Hand a request to an engine, whose number is returned; None where it is refused."""
        hosts = self._hosts.get(request.service)
        number = -1
        try:
            if hosts is None:
                raise InvalidRequest(
                    f"model {request.service!r} is not served; possible are {', '.join(sorted(self._hosts))}"
                )
            number = hosts[0]
            if len(hosts) > 1:
                views = [EngineView(host, self._replicas[host].unfinished) for host in hosts]
                number = self._dispatch.choose(request, self._dispatched[request.service], views)
            self._dispatched[request.service] += 1
            self._replicas[number].submit(request)
        except InvalidRequest as error:
            self._refuse(request, number, str(error))
            return None
        return number

    def _refuse(self, request: Request, number: int, why: str) -> None:
        now_ns = self._clock.now_ns
        slo = request.slo
        if number >= 0:
            service = self._replicas[number].spec.services[request.service]
            slo = resolve_slo(slo, service.slo, service.execution_s)
        self._rows.append(
            RequestRow(
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
        )
        self._source.ended(request.id, now_ns)

    def _record(self, title: str, facts: Mapping[str, str]) -> RunRecord:
        end_ns = max((replica.recorder.end_ns for replica in self._replicas), default=0)
        samples, spans, totals = [], [], []
        for replica in self._replicas:
            replica.close()
            replica.recorder.close(end_ns)
            samples += replica.recorder.samples
            spans += replica.recorder.spans
            totals.append(replica.recorder.totals(replica.scheduler.stats()))
        samples.sort(key=lambda sample: (sample.time_ns, sample.engine))
        spans.sort(key=lambda span: (span.start_ns, span.engine))
        execution_s = {
            name: service.execution_s
            for replica in self._replicas
            for name, service in replica.spec.services.items()
            if service.execution_s is not None
        }
        return RunRecord(
            title=title,
            requests=self._rows,
            samples=samples,
            engines=totals,
            spans=spans,
            execution_s=execution_s,
            token_gaps=self._gaps,
            end_ns=end_ns,
            facts=facts,
        )


def _row(state: RequestState, reason: FinishReason, now_ns: int, engine: int) -> RequestRow:
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
        error=why_refused(state, now_ns) if reason is FinishReason.REFUSED else None,
        cached_tokens=state.num_cached_tokens,
        evictions=state.num_preemptions,
        recomputed_tokens=state.num_recomputed_tokens,
        largest_gap_ns=state.largest_gap_ns,
        slo=state.slo,
    )
