"""One service inside the scheduler: its queue, its running batch, its past, and the prefixes it shares."""

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
from shoal.schedule.shared_prefixes import SharedPrefixes
from shoal.schedule.slo_expired import slo_expired_ns
from shoal.schedule.stats import Observed
from shoal.schedule.step_limit import StepLimit
from shoal.schedule.validation import ServiceLimits, longest_total
from shoal.schedule.waiting_queue import WaitingQueue

_RECENT_STEPS = 16
_MEASURED_TOKENS = 32
"""Tokens of prompts from which on a step says how long they take."""
_MEASURED_STEPS = 5


@dataclass(frozen=True, slots=True)
class ServiceStatistics:
    """What one service learns from its requests as they arrive and end."""

    history: LengthHistory
    """Output lengths of the recent past."""
    monitor: ServiceMonitor
    """Traffic and execution times of late."""
    predictor: LengthPredictor
    """Predicts the output length of each request."""

    def finished(self, request: RequestState, now_ns: int) -> None:
        """A request has ended now with output, of its own accord."""
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
        """Its traffic of late, and how well the learned predictor did, if it is that."""
        traffic = self.monitor.snapshot(now_ns)
        if not isinstance(self.predictor, LearnedLengths):
            return Observed(traffic=traffic)
        return Observed(
            traffic=traffic, accuracy=self.predictor.accuracy, corrections=self.predictor.corrections
        )


class ServiceState:
    """What the scheduler keeps of one service; policies see it as ``ServiceView``.

    due_ns: when a waiting request starves. slo_expired_ns: from when on it is put last;
    None: it never is.
    """

    def __init__(
        self,
        layout: ServiceLayout,
        block_size: int,
        statistics: ServiceStatistics,
        due_ns: Callable[[RequestState], int],
        limit: StepLimit,
        limits: ServiceLimits,
        *,
        slo_expired_ns: Callable[[RequestState], int | None] | None = None,
    ) -> None:
        self.service = layout.service
        self.companions: Sequence[str] = ()
        """As in ``ServiceView``; kept by the registry, as the layout is."""
        self.layout = layout
        self.statistics = statistics
        self.slo = limits.slo
        self.execution_s = limits.execution_s
        self.weights = limits.weights
        self.waiting = WaitingQueue(due_ns, slo_expired_ns)
        self.running = RunningBatch()
        self.shared = SharedPrefixes()
        self.limit = limit
        """On its steps; smaller after one that failed."""
        self.last_step = -1
        self.last_turn = -1
        self.last_prefill = -1
        self.consecutive_steps = 0
        self.starved_served_ns: int | None = None
        """When a step was last made for one of its starved requests."""
        self.recent_steps_ns: deque[int] = deque(maxlen=_RECENT_STEPS)
        """Durations of its latest steps."""
        self._prompt_token_ns: dict[bool, deque[int]] = {
            scored: deque(maxlen=_MEASURED_STEPS) for scored in (False, True)
        }
        self._quota = limits.quota
        self._block_size = block_size

    @property
    def traits(self) -> ServiceTraits:
        """What is known of the service now."""
        mean_s, deviation_s = self.statistics.monitor.execution
        mean_tokens = self.statistics.history.mean
        return ServiceTraits(mean_s, deviation_s, mean_tokens, self._quota, self.execution_s)

    def stepped(self, plan: StepPlan, durations_ns: Sequence[int], *, scored: bool) -> None:
        """A plan of its rows was made; its iterations took so long.

        scored: whether log-probabilities of prompt tokens were computed.
        """
        self.recent_steps_ns += durations_ns
        tokens, decodes = sum(plan.new_tokens), plan.new_tokens.count(1)
        if tokens - decodes >= _MEASURED_TOKENS:
            self._prompt_token_ns[scored].append(durations_ns[0] // tokens)

    def prompt_token_ns(self, *, scored: bool = False) -> int:
        """How long a token of a step with prompts takes, the median of its latest; 0: not known.

        scored: of a step that also computes log-probabilities of prompt tokens. With logits over the whole
        vocabulary for each of them, that may be many times as long.
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
        """What its past, and the progress of its running requests, say about output lengths."""
        running = self.running
        generated = running.num_tokens_with_in_flight - running.num_prompt_tokens
        return self.statistics.history.distribution(generated)

    def forecast(self) -> MemoryForecast:
        """The memory of its running requests."""
        return MemoryForecast(self.layout, self._block_size, self.running, self.shared_blocks(), self.lengths)

    def forecast_without(self, gone: IntArray) -> MemoryForecast:
        """The same if the requests in some rows had left."""
        forecast = self.forecast()
        if not len(gone):
            return forecast
        rows = np.delete(np.arange(len(self.running)), gone)
        return forecast.only(rows, self.shared_blocks(rows))

    def shared_blocks(self, rows: IntArray | None = None) -> SharedBlocks | None:
        """Blocks that several running requests hold, or several of those in ``rows``."""
        if not self.shared.any:
            return None
        requests = self.running.requests
        if rows is not None:
            requests = [requests[row] for row in rows.tolist()]
        return self.shared.sets([(request.block_ids, request.num_shareable) for request in requests])

    def rename(self, moved: Mapping[int, int]) -> list[RequestState]:
        """Blocks got other numbers; returns the running requests whose tables changed."""
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
    )


def new_service_state(
    pool: BlockPool,
    service: str,
    limits: ServiceLimits,
    options: SchedulerOptions,
    due_ns: Callable[[RequestState], int],
) -> ServiceState:
    """A service without requests, which learns what the scheduler's order and admission ask for."""
    longest = max(1, longest_total(pool, service, limits) - 1)
    history = options.admission.new_history(longest)
    monitor = ServiceMonitor() if limits.execution_s is None else ServiceMonitor(limits.execution_s)
    read = options.order.reads_lengths or options.admission.reads_lengths
    lengths = options.lengths if read or options.lengths != "history" else "maximum"
    return ServiceState(
        pool.layout.services[service],
        pool.block_size,
        ServiceStatistics(history, monitor, make_predictor(lengths, longest, history)),
        due_ns,
        StepLimit(options.max_batched_tokens),
        limits,
        slo_expired_ns=None if options.on_hopeless == "serve" else slo_expired_ns,
    )
