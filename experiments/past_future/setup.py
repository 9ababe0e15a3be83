"""What Past-Future's experiments share: its systems, and a full queue on one engine."""

from dataclasses import dataclass

import numpy as np

from experiments.result import Value
from shoal.core import Request, SamplingParams, SyntheticPrompt
from shoal.forecast import FittedTimes, LatencyModel, LengthHistory
from shoal.schedule import (
    Admission,
    Conservative,
    Fcfs,
    Oracle,
    PastFuture,
    Scheduler,
    SchedulerOptions,
)
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.running_batch import IntArray, RequestTable
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Watch, token_layout
from shoal.workload import LENGTHS

PAPER = "Past-Future (Gong et al., 2025)"

ADMIT_EVERY = 10
"""Steps from one look at the queue to the next."""
CAPACITY = 120 * 1024
"""Tokens of KV of the experiments with a full queue."""
PUBLISHED_DRAWS = 3
REQUESTS = 3_000
OUR_RESERVE = 0.024
OUR_VICTIM = "large-young"

_PAST_SEED = 1_000_003
_SERVICE = "llama-2-7b"
_NO_LIMIT = 1 << 20
_NEVER_S = 1e9
_TIMES = FittedTimes(
    LatencyModel(constant_s=0.02, sequence_s=1e-6, token_s=1e-5, context_s=1e-8, work_s=1e-10)
)
"""Any: what is counted here depends on steps, not on how long they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedLimit(Conservative):
    """Conservative, where what is set aside need not be the limit at which outputs really end."""

    assumed: int
    """Output tokens set aside for each request, more once it has more."""

    def tokens_set_aside(self, table: RequestTable) -> IntArray:
        """Prompts and assumed outputs."""
        return np.maximum(table.num_prompt_tokens + self.assumed, table.num_tokens_with_in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPastFuture(PastFuture):
    """Past-Future in a service that has answered requests before."""

    past: str = ""
    """Name of the distribution of lengths that fill its window; "" if it has just begun."""

    def new_history(self, maximum: int) -> LengthHistory:
        """A window that is full of the past's lengths, if there was one."""
        history = PastFuture.new_history(self, maximum)
        if self.past:
            for length in LENGTHS[self.past].sample(self.window, _PAST_SEED)[1].tolist():
                history.record(length)
        return history


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPastFuture(WarmPastFuture):
    """Past-Future as its table seems to have been measured.

    A window without a past is full of the longest output.
    """

    num_draws: int = PUBLISHED_DRAWS
    """M* is the largest of so many draws."""
    cold_start: str = "max"
    draws: str = "max"

    def samples(self, requests: int) -> int:
        """As many draws as asked for."""
        return self.num_draws


def options_of(admission: Admission, victim: str = "newest") -> SchedulerOptions:
    """A system's scheduler: first come, first served, nobody preempted, none of our guards and limits.

    victim: ``newest`` in the paper's systems.
    """
    return SchedulerOptions(
        order=Fcfs(),
        admission=admission,
        victim=victim,
        preemption_mode="recompute",
        preempt_for_waiting="never",
        starvation_s=_NEVER_S,
        max_token_gap_s=_NEVER_S,
        max_running=_NO_LIMIT,
        max_batched_tokens=_NO_LIMIT,
    )


def synthetic_requests(lengths: str, count: int, seed: int, longest: int, service: str) -> list[Request]:
    """Requests of a named distribution of lengths, all at time 0; outputs end at ``longest``."""
    prompts, outputs = LENGTHS[lengths].sample(count, seed)
    sampling = SamplingParams(max_tokens=longest)
    return [
        Request(
            id=f"r{number}",
            service=service,
            prompt=SyntheticPrompt(prompt),
            sampling=sampling,
            seed=number,
            true_output_tokens=output,
        )
        for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullQueue:
    """One run of requests that all wait from the beginning."""

    lengths: str
    """Name of a distribution."""
    longest: int
    """Output tokens at which answers end."""
    admission: Admission
    """The system's."""
    victim: str = "newest"
    """The policy's name."""
    requests: int = REQUESTS
    """How many."""
    seed: int = 0
    """Keys their lengths."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the paper's table has of a run: shares of the capacity, and counts for each request."""

    steps: int
    """Those that decode."""
    kv_in_use: float
    """Mean over steps."""
    future_required: float
    """Mean, over the moments at which the queue is looked at, of the memory that running requests will need
    at once (M* of their true lengths)."""
    preemptions: float
    """How often each request was preempted."""
    recomputed_tokens: int
    """Tokens computed again because of it."""
    turned_away: float
    """How often for each request, at such a moment, the admission would have admitted the first in the queue,
    for whose known tokens there was no room."""

    def metrics(self) -> dict[str, Value]:
        """Under the names that all of these experiments use."""
        return {
            "decoding_steps": self.steps,
            "kv_in_use": self.kv_in_use,
            "future_required": self.future_required,
            "preemptions_per_request": self.preemptions,
            "turned_away_per_request": self.turned_away,
            "recomputed_tokens": self.recomputed_tokens,
        }


class _Onlooker:
    """Sums up, at the moments at which the queue is looked at, what no record of a run has."""

    def __init__(self, scheduler: Scheduler, admission: Admission) -> None:
        self.moments = self.peaks = self.turned_away = 0
        self._service = scheduler.services[_SERVICE]
        self._layout = token_layout(CAPACITY, 1, _SERVICE)
        self._admission = admission
        self._truth = Oracle()
        scheduler.observe_steps(self.note)

    def note(self, first: int, steps: int) -> None:
        """Steps begin in which the same requests run, so that their peak stays the same."""
        moments = (first + steps - 1) // ADMIT_EVERY - (first - 1) // ADMIT_EVERY
        service = self._service
        if not moments or not service.waiting:
            return
        forecast = MemoryForecast(
            self._layout.services[_SERVICE],
            self._layout.block_size,
            service.running,
            shared=None,
            past=service.lengths,
        )
        self.moments += moments
        self.peaks += moments * int(self._truth.demand([forecast]))
        # Only overcommitment would admit a request that there is no room for.
        if isinstance(self._admission, Conservative) and self._admission.overcommit > 1:
            head = RequestTable(service.waiting[:1])
            self.turned_away += moments * self._admission.how_many_fit(forecast, head, [], CAPACITY)


def run_full_queue(run: FullQueue) -> Counts:
    """Simulate one run."""
    engine = EngineSpec(
        services={_SERVICE: ServiceSpec(times=_TIMES)},
        layout=token_layout(CAPACITY, 1, _SERVICE),
        scheduler=options_of(run.admission, run.victim),
        prefix_caching=False,
    )
    requests = synthetic_requests(run.lengths, run.requests, run.seed, run.longest, _SERVICE)
    # Nobody looks at samples over time here.
    simulation = Simulation([engine], OpenLoop(requests), watch=Watch(sample_s=_NEVER_S))
    onlooker = _Onlooker(simulation.replicas[0].scheduler, run.admission)
    totals = simulation.run().engines[0]
    return Counts(
        steps=totals.decode_steps,
        kv_in_use=totals.kv_used_mean,
        future_required=onlooker.peaks / max(1, onlooker.moments) / CAPACITY,
        preemptions=totals.preemptions / run.requests,
        recomputed_tokens=totals.recomputed_tokens,
        turned_away=onlooker.turned_away / run.requests,
    )
