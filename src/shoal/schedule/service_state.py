"""Scheduler state of one service: waiting queue, running batch, shared prefixes, statistics, step times."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import NO_GOALS, LengthPredictor, RequestRecord, StepPlan
from shoal.core.slo import met
from shoal.forecast import (
    LearnedLengths,
    LengthDistribution,
    LengthHistory,
    ServiceMonitor,
    SharedBlocks,
    make_predictor,
)
from shoal.kvcache import BlockPool, ServiceLayout
from shoal.schedule.options import SchedulerOptions
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.policies.view import ServiceTraits
from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import IntArray, RunningBatch
from shoal.schedule.service_limits import ServiceLimits, max_total_tokens
from shoal.schedule.shared_prefixes import SharedPrefixes
from shoal.schedule.slo_expired import slo_expired_ns
from shoal.schedule.starvation_threshold import StarvationThreshold
from shoal.schedule.stats import Observed
from shoal.schedule.step_limit import StepLimit
from shoal.schedule.waiting_queue import WaitingQueue

_RECENT_STEPS = 16
_MEASURED_TOKENS = 32
"""Minimum of prompt tokens in a step for a measurement of the time per token."""
_MEASURED_STEPS = 5


@dataclass(frozen=True, slots=True)
class ServiceStatistics:
    """Statistics that one service learns from its requests."""

    history: LengthHistory
    """Recent output lengths."""
    monitor: ServiceMonitor
    """Recent traffic and execution times."""
    predictor: LengthPredictor

    def finished(self, request: RequestState, now_ns: int) -> None:
        """A request with output has finished (not cancelled, refused or failed)."""
        self.history.record(request.num_generated)
        self.predictor.record(request.request, request.num_generated)
        self.monitor.finished(
            now_ns,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_generated,
            execution_ns=request.service_time_ns,
            arrival_ns=request.arrival_ns,
            first_token_ns=request.first_token_ns,
            met=None if request.slo is NO_GOALS else met(_record(request, now_ns), request.slo),
        )

    def observed(self, now_ns: int) -> Observed:
        """Recent traffic, and the accuracy of a learned predictor."""
        traffic = self.monitor.snapshot(now_ns)
        if not isinstance(self.predictor, LearnedLengths):
            return Observed(traffic=traffic)
        return Observed(
            traffic=traffic, accuracy=self.predictor.accuracy, corrections=self.predictor.corrections
        )


class ServiceState:
    """Scheduler state of one service; policies see it as ``ServiceView``.

    starvation: when its requests starve. slo_expired_ns: time at which a waiting request is put last because
    its latency goals can no longer be met; None: never.
    """

    def __init__(
        self,
        layout: ServiceLayout,
        block_size: int,
        statistics: ServiceStatistics,
        starvation: StarvationThreshold,
        limit: StepLimit,
        limits: ServiceLimits,
        *,
        slo_expired_ns: Callable[[RequestState], int | None] | None = None,
    ) -> None:
        self.service = layout.service
        self.companions: Sequence[str] = ()
        """See ``ServiceView``; set by the registry, like the layout."""
        self.layout = layout
        self.statistics = statistics
        self.slo = limits.slo
        self.execution_s = limits.execution_s
        self.weights = limits.weights
        self.weight_bytes = limits.weight_bytes
        self.starvation = starvation
        self.waiting = WaitingQueue(starvation.due_ns, slo_expired_ns)
        self.running = RunningBatch()
        self.shared = SharedPrefixes()
        self.limit = limit
        """Limit on its steps; smaller after a failed one."""
        self.last_step = -1
        self.last_turn = -1
        self.last_prefill = -1
        self.consecutive_steps = 0
        self.starved_served_ns: int | None = None
        """Time of the last step for one of its starved requests."""
        self.recent_steps_ns: deque[int] = deque(maxlen=_RECENT_STEPS)
        """Durations of its latest steps."""
        self._prompt_token_ns: dict[bool, deque[int]] = {
            scored: deque(maxlen=_MEASURED_STEPS) for scored in (False, True)
        }
        self._quota = limits.quota
        self._block_size = block_size

    @property
    def traits(self) -> ServiceTraits:
        mean_s, deviation_s = self.statistics.monitor.execution
        mean_tokens = self.statistics.history.mean
        return ServiceTraits(mean_s, deviation_s, mean_tokens, self._quota, self.execution_s)

    def record_step(self, plan: StepPlan, durations_ns: Sequence[int], *, scored: bool) -> None:
        """Record the durations of a plan's iterations.

        scored: log-probabilities of prompt tokens were computed.
        """
        self.recent_steps_ns += durations_ns
        tokens, decodes = sum(plan.new_tokens), plan.new_tokens.count(1)
        if tokens - decodes >= _MEASURED_TOKENS:
            self._prompt_token_ns[scored].append(durations_ns[0] // tokens)

    def uncount_steps(self, steps: int) -> None:
        """``steps`` iterations of its last plan were not done."""
        self.last_step -= steps
        self.last_turn -= steps
        self.consecutive_steps -= steps

    def prompt_token_ns(self, *, scored: bool = False) -> int:
        """Time per token of steps with prompts, the median of its latest steps; 0: unknown.

        scored: of steps that also compute log-probabilities of prompt tokens. These need logits over the
        whole vocabulary for each token, which may take many times as long.
        """
        measured = sorted(self._prompt_token_ns[scored])
        return measured[(len(measured) - 1) // 2] if measured else 0

    @property
    def scores_prompts(self) -> bool:
        """Whether its next step with prompts may have to compute log-probabilities of prompt tokens."""
        if self.waiting.num_scored:
            return True
        rows = self.running.prefilling.nonzero()[0].tolist()
        return any(self.running.requests[row].is_scored for row in rows)

    def lengths(self) -> LengthDistribution:
        """Distribution of output lengths, from its history and the progress of its running requests."""
        running = self.running
        generated = running.num_tokens_with_in_flight - running.num_prompt_tokens
        return self.statistics.history.distribution(generated)

    def forecast(self) -> MemoryForecast:
        """Memory forecast of its running requests."""
        return MemoryForecast(self.layout, self._block_size, self.running, self.shared_blocks(), self.lengths)

    def forecast_without(self, removed: IntArray) -> MemoryForecast:
        """``forecast`` without the requests in some rows."""
        forecast = self.forecast()
        if not len(removed):
            return forecast
        rows = np.delete(np.arange(len(self.running)), removed)
        return forecast.only(rows, self.shared_blocks(rows))

    def shared_blocks(self, rows: IntArray | None = None) -> SharedBlocks | None:
        """Blocks shared among the running requests, or among those in ``rows``."""
        if not self.shared.any:
            return None
        requests = self.running.requests
        if rows is not None:
            requests = [requests[row] for row in rows.tolist()]
        return self.shared.sets([(request.block_ids, request.num_shareable) for request in requests])

    def rename(self, moved: Mapping[int, int]) -> list[RequestState]:
        """Rename blocks after a compaction; returns the running requests whose block tables changed."""
        self.shared.rename(moved)
        changed = []
        for request in self.running.requests:
            if any(block in moved for block in request.block_ids):
                request.block_ids = [moved.get(block, block) for block in request.block_ids]
                changed.append(request)
        return changed


def _record(request: RequestState, now_ns: int) -> RequestRecord:
    return RequestRecord(
        request_id=request.request.id,
        service=request.service,
        arrival_ns=request.arrival_ns,
        first_token_ns=request.first_token_ns,
        finish_ns=now_ns,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_generated,
        largest_gap_ns=request.largest_gap_ns,
    )


def new_service_state(
    pool: BlockPool,
    service: str,
    limits: ServiceLimits,
    options: SchedulerOptions,
) -> ServiceState:
    """A service without requests, with the statistics that the scheduler's order and admission use."""
    longest = max(1, max_total_tokens(pool, service, limits) - 1)
    history = options.admission.new_history(longest)
    monitor = ServiceMonitor() if limits.execution_s is None else ServiceMonitor(limits.execution_s)
    read = options.order.reads_lengths or options.admission.reads_lengths
    lengths = options.lengths if read or options.lengths != "history" else "maximum"
    return ServiceState(
        pool.layout.services[service],
        pool.block_size,
        ServiceStatistics(history, monitor, make_predictor(lengths, longest, history)),
        StarvationThreshold(options.starvation_s if limits.starvation_s is None else limits.starvation_s),
        StepLimit(options.max_batched_tokens),
        limits,
        slo_expired_ns=None if options.on_hopeless == "serve" else slo_expired_ns,
    )
