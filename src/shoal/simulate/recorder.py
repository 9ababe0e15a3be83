"""Records of a simulated engine: totals, samples of its state at fixed times, and optional spans."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.measure import EngineTotals, Event, Sample, ServiceSample, StepSpan, WeightsTotals
from shoal.schedule import SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests and memory of an engine by service; services with nothing may be missing."""

    waiting: Mapping[str, int]
    """Waiting requests."""
    running: Mapping[str, int]
    """Running requests, also those whose weights are absent."""
    used: Mapping[str, int]
    """Merged blocks in use."""

    def with_used(self, service: str, used: int) -> "EngineLoad":
        """The same with ``used`` merged blocks of ``service``."""
        return EngineLoad(self.waiting, self.running, {**self.used, service: used})


_IDLE = EngineLoad({}, {}, {})


class Recorder:
    """The records of one engine.

    engine: its number. capacity: merged blocks of its pool. sample_ns: time between two samples. spans:
    whether to keep spans.
    """

    def __init__(self, engine: int, capacity: int, sample_ns: int, *, spans: bool) -> None:
        self.samples: list[Sample] = []
        self.spans: list[StepSpan] = []
        self.events: list[Event] = []
        self.end_ns = 0
        """End of the last step."""
        self._engine = engine
        self._capacity = capacity
        self._sample_ns = sample_ns
        self._keeps_spans = spans
        self._latest_events: dict[str, int] = {}
        """Place of the latest event of each kind in ``events``."""
        self._next_ns = 0
        self._tokens = 0
        self._steps = self._decode_steps = self._busy_ns = 0
        self._used_sum = self._used_peak = 0

    def step(
        self,
        service: str,
        start_ns: int,
        end_ns: int,
        load: EngineLoad,
        *,
        decodes: int,
        prefill_tokens: int,
        tokens: int,
    ) -> None:
        """Record one step from ``start_ns`` to ``end_ns``, after which ``tokens`` were delivered.

        load: during the step. decodes: rows that decode.
        """
        used = sum(load.used.values())
        if self._next_ns < end_ns:
            self._sample_idle(start_ns)
            while self._next_ns < end_ns:
                self._sample(load)
        self._tokens += tokens
        self._steps += 1
        self._decode_steps += decodes > 0
        self._busy_ns += end_ns - start_ns
        self._used_sum += used
        self._used_peak = max(self._used_peak, used)
        self.end_ns = end_ns
        if self._keeps_spans:
            self._span(StepSpan(self._engine, service, start_ns, end_ns, 1, decodes, prefill_tokens))

    def decodes(
        self,
        service: str,
        start_ns: int,
        ends_ns: Sequence[int],
        load: EngineLoad,
        rows: int,
        used: Sequence[int],
    ) -> None:
        """Record a run of steps in which ``rows`` of the requests decode.

        load: meanwhile. used: merged blocks in use by ``service``, by step, instead of those of ``load``.
        """
        last_ns, done = ends_ns[-1], 0
        others = sum([blocks for name, blocks in load.used.items() if name != service])
        if self._next_ns < last_ns:
            self._sample_idle(start_ns)
            while self._next_ns < last_ns:
                # A step lasts until just before its end.
                at = bisect_left(ends_ns, self._next_ns + 1)
                self._tokens += (at - done) * rows
                done = at
                self._sample(load.with_used(service, used[at]))
        self._tokens += (len(ends_ns) - done) * rows
        self._steps += len(ends_ns)
        self._decode_steps += len(ends_ns)
        self._busy_ns += last_ns - start_ns
        self._used_sum += sum(used) + others * len(used)
        self._used_peak = max(self._used_peak, used[-1] + others)
        self.end_ns = last_ns
        if self._keeps_spans:
            self._span(StepSpan(self._engine, service, start_ns, last_ns, len(ends_ns), rows, 0))

    def event(self, kind: str, now_ns: int) -> None:
        """Record an event of a kind (``Event.kind``); those within one interval of samples are one."""
        place = self._latest_events.get(kind)
        last = None if place is None else self.events[place]
        if last is not None and last.time_ns // self._sample_ns == now_ns // self._sample_ns:
            self.events[self._latest_events[kind]] = replace(last, count=last.count + 1)
        else:
            self._latest_events[kind] = len(self.events)
            self.events.append(Event(now_ns, self._engine, kind))

    def close(self, end_ns: int) -> None:
        """End the record; the engine has been idle since its last step."""
        self._sample_idle(end_ns + 1)

    def totals(
        self, stats: Sequence[SchedulerStats], max_running: int, up: float | None = None
    ) -> EngineTotals:
        """Sums over the run; stats: of each scheduler that the engine had, one after the other.

        up: as in ``EngineTotals``.
        """
        services = [service for each in stats for service in each.services.values()]
        return EngineTotals(
            steps=self._steps,
            decode_steps=self._decode_steps,
            busy_ns=self._busy_ns,
            kv_used_mean=self._used_sum / (self._steps * self._capacity) if self._steps else 0.0,
            kv_used_peak=self._used_peak / self._capacity,
            preemptions=sum(service.preemptions for service in services),
            recomputed_tokens=sum(service.recomputed_tokens for service in services),
            swapped_tokens=sum(service.swapped_tokens for service in services),
            prefill_tokens=sum(service.prompt_tokens - service.cached_tokens for service in services),
            cached_tokens=sum(service.cached_tokens for service in services),
            output_tokens=sum(service.output_tokens for service in services),
            weights=_weights_totals(stats),
            max_running=max_running,
            up=up,
        )

    def _span(self, span: StepSpan) -> None:
        """Keep a span; decode steps that follow decode steps of the same rows are added to their span."""
        last = self.spans[-1] if self.spans else None
        if (
            last is not None
            and (last.service, last.decodes, last.end_ns) == (span.service, span.decodes, span.start_ns)
            and not (last.prefill_tokens or span.prefill_tokens)
        ):
            self.spans[-1] = replace(last, end_ns=span.end_ns, steps=last.steps + span.steps)
        else:
            self.spans.append(span)

    def _sample_idle(self, until_ns: int) -> None:
        """Sample an idle engine until ``until_ns``; only the first and the last sample are kept."""
        if self._next_ns < until_ns:
            self._sample(_IDLE)
            further = (until_ns - 1 - self._next_ns) // self._sample_ns
            if further >= 0:
                self._next_ns += further * self._sample_ns
                self._sample(_IDLE)

    def _sample(self, load: EngineLoad) -> None:
        names = [name for name, blocks in load.used.items() if blocks]
        services = {
            name: ServiceSample(
                load.waiting.get(name, 0), load.running.get(name, 0), load.used.get(name, 0) / self._capacity
            )
            for name in dict.fromkeys([*load.waiting, *load.running, *names])
        }
        self.samples.append(
            Sample(
                time_ns=self._next_ns,
                engine=self._engine,
                waiting=sum(load.waiting.values()),
                running=sum(load.running.values()),
                kv_used=sum(load.used.values()) / self._capacity,
                tokens_per_s=self._tokens * 1e9 / self._sample_ns,
                services=services,
            )
        )
        self._tokens = 0
        self._next_ns += self._sample_ns


def _weights_totals(stats: Sequence[SchedulerStats]) -> dict[str, WeightsTotals]:
    """Totals by name of the weights, over all schedulers that the engine had."""
    totals: dict[str, WeightsTotals] = {}
    for each in stats:
        own: dict[str, WeightsTotals] = {}
        for service, state in each.services.items():
            weights = state.weights
            if weights is None:
                continue
            known = own.get(weights.name)
            own[weights.name] = WeightsTotals(
                services=(service,) if known is None else (*known.services, service),
                num_bytes=weights.num_bytes,
                fetches=weights.fetches,
                evictions=weights.evictions,
                fetching_s=weights.fetching_s,
                waits=weights.waits,
                waiting_s=weights.waiting_s,
                longest_wait_s=weights.longest_wait_s,
            )
        for name, found in own.items():
            totals[name] = totals[name] + found if name in totals else found
    return totals
