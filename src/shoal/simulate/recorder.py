"""Records of a simulated engine: totals, samples of its state at fixed times, and optional spans."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from shoal.measure import EngineTotals, Sample, StepSpan, WeightsTotals
from shoal.schedule import SchedulerStats


class Recorder:
    """The records of one engine.

    engine: its number. capacity: merged blocks of its pool. sample_ns: time between two samples. spans:
    whether to keep spans.
    """

    def __init__(self, engine: int, capacity: int, sample_ns: int, *, spans: bool) -> None:
        self.samples: list[Sample] = []
        self.spans: list[StepSpan] = []
        self.end_ns = 0
        """End of the last step."""
        self._engine = engine
        self._capacity = capacity
        self._sample_ns = sample_ns
        self._keeps_spans = spans
        self._next_ns = 0
        self._tokens = 0
        self._steps = self._decode_steps = self._busy_ns = 0
        self._used_sum = self._used_peak = 0

    def step(
        self,
        service: str,
        start_ns: int,
        end_ns: int,
        *,
        waiting: int,
        running: int,
        used: int,
        decodes: int,
        prefill_tokens: int,
        tokens: int,
    ) -> None:
        """Record one step from ``start_ns`` to ``end_ns``, after which ``tokens`` were delivered.

        waiting, running: requests during the step. used: merged blocks in use. decodes: rows that decode.
        """
        if self._next_ns < end_ns:
            self._sample_idle(start_ns)
            while self._next_ns < end_ns:
                self._sample(waiting, running, used)
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
        waiting: int,
        running: int,
        rows: int,
        used: Sequence[int],
    ) -> None:
        """Record a run of steps in which ``rows`` of the requests decode.

        waiting, running: requests meanwhile. used: merged blocks in use, by step.
        """
        last_ns, done = ends_ns[-1], 0
        if self._next_ns < last_ns:
            self._sample_idle(start_ns)
            while self._next_ns < last_ns:
                # A step lasts until just before its end.
                at = bisect_left(ends_ns, self._next_ns + 1)
                self._tokens += (at - done) * rows
                done = at
                self._sample(waiting, running, used[at])
        self._tokens += (len(ends_ns) - done) * rows
        self._steps += len(ends_ns)
        self._decode_steps += len(ends_ns)
        self._busy_ns += last_ns - start_ns
        self._used_sum += sum(used)
        self._used_peak = max(self._used_peak, used[-1])
        self.end_ns = last_ns
        if self._keeps_spans:
            self._span(StepSpan(self._engine, service, start_ns, last_ns, len(ends_ns), rows, 0))

    def close(self, end_ns: int) -> None:
        """End the record; the engine has been idle since its last step."""
        self._sample_idle(end_ns + 1)

    def totals(self, stats: Sequence[SchedulerStats]) -> EngineTotals:
        """Sums over the run; stats: of each scheduler that the engine had, one after the other."""
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
            self._sample(0, 0, 0)
            further = (until_ns - 1 - self._next_ns) // self._sample_ns
            if further >= 0:
                self._next_ns += further * self._sample_ns
                self._sample(0, 0, 0)

    def _sample(self, waiting: int, running: int, used: int) -> None:
        rate = self._tokens * 1e9 / self._sample_ns
        share = used / self._capacity
        self.samples.append(Sample(self._next_ns, self._engine, waiting, running, share, rate))
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
