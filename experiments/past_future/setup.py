"""Shared set-up of Past-Future's experiments: scheduler options, and a full queue on one engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.result import Value
from shoal.core import Request, SamplingParams, SyntheticPrompt
from shoal.forecast import FittedTimes, LatencyModel
from shoal.schedule import Admission, Conservative, Fcfs, Oracle, Scheduler, SchedulerOptions
from shoal.schedule.policies.memory_forecast import MemoryForecast
from shoal.schedule.running_batch import RequestTable
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Watch, token_layout
from shoal.workload import LENGTHS

PAPER = "Past-Future (Gong et al., 2025)"

ADMIT_EVERY = 10
"""Steps between two admissions."""
CAPACITY = 120_000
"""KV tokens of the experiments with a full queue."""
REQUESTS = 3_000
OUR_RESERVE = 0.024
OUR_VICTIM = "large-young"

_SERVICE = "llama-2-7b"
_NO_LIMIT = 1 << 20
_NEVER_S = 1e9
_TIMES = FittedTimes(
    LatencyModel(constant_s=0.02, sequence_s=1e-6, token_s=1e-5, context_s=1e-8, work_s=1e-10)
)
"""Arbitrary: the counts depend on steps, not on their duration."""


def options_of(admission: Admission, victim: str = "newest") -> SchedulerOptions:
    """Scheduler options of the paper's systems: FCFS, without our guards and limits."""
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


def drawn_lengths(lengths: str, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and output tokens of requests, from a named distribution."""
    prompts, outputs = LENGTHS[lengths].sample(count, seed)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def requests_of(lengths: Sequence[tuple[int, int]], longest: int, service: str) -> list[Request]:
    """Requests with these prompt and output tokens, all at time 0; ``longest`` limits outputs."""
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
        for number, (prompt, output) in enumerate(lengths)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullQueue:
    """One run in which all requests are queued from the start; it ends with the last admission."""

    lengths: str
    """Name of a distribution."""
    longest: int
    """Limit of output tokens."""
    admission: Admission
    victim: str = "newest"
    requests: int = REQUESTS
    seed: int = 0
    """Of the lengths."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The columns of Table 1: shares of the capacity, and counts per request that has ended."""

    steps: int
    """Decode steps."""
    kv_in_use: float
    """Mean over steps."""
    future_required: float
    """Mean over admissions of the peak memory that running requests will need (M* of their true lengths)."""
    preemptions: float
    recomputed_tokens: int
    turned_away: float
    """Admissions per request at which the policy would have admitted the head of the queue, but its known
    tokens did not fit."""

    def metrics(self) -> dict[str, Value]:
        return {
            "decoding_steps": self.steps,
            "kv_in_use": self.kv_in_use,
            "future_required": self.future_required,
            "preemptions_per_request": self.preemptions,
            "turned_away_per_request": self.turned_away,
            "recomputed_tokens": self.recomputed_tokens,
        }


class _QueueMonitor:
    """Sums, over admissions, what a run's record does not have."""

    def __init__(self, scheduler: Scheduler, admission: Admission) -> None:
        self.admissions = self.peaks = self.turned_away = 0
        self._service = scheduler.services[_SERVICE]
        self._layout = token_layout(CAPACITY, 1, _SERVICE)
        self._admission = admission
        self._truth = Oracle()
        scheduler.observe_steps(self.on_steps)

    def on_steps(self, first: int, steps: int) -> None:
        """Count the admissions in steps with the same running requests, whose peak stays the same."""
        admissions = (first + steps - 1) // ADMIT_EVERY - (first - 1) // ADMIT_EVERY
        service = self._service
        if not admissions or not service.waiting:
            return
        forecast = MemoryForecast(
            self._layout.services[_SERVICE],
            self._layout.block_size,
            service.running,
            shared=None,
            past=service.lengths,
        )
        self.admissions += admissions
        self.peaks += admissions * int(self._truth.demand([forecast]))
        # Only overcommitment admits a request that does not fit.
        if isinstance(self._admission, Conservative) and self._admission.overcommit > 1:
            head = RequestTable(service.waiting[:1])
            self.turned_away += admissions * self._admission.how_many_fit(forecast, head, [], CAPACITY)


def run_full_queue(run: FullQueue) -> Counts:
    engine = EngineSpec(
        services={_SERVICE: ServiceSpec(times=_TIMES)},
        layout=token_layout(CAPACITY, 1, _SERVICE),
        scheduler=options_of(run.admission, run.victim),
        prefix_caching=False,
    )
    requests = requests_of(drawn_lengths(run.lengths, run.requests, run.seed), run.longest, _SERVICE)
    # Samples over time are not used here.
    simulation = Simulation([engine], OpenLoop(requests), watch=Watch(sample_s=_NEVER_S))
    scheduler = simulation.replicas[0].scheduler
    monitor = _QueueMonitor(scheduler, run.admission)
    # Steps after the last admission are not counted.
    record = simulation.run(stop=lambda: scheduler.unfinished > 0 and not scheduler.waiting)
    totals, ended = record.engines[0], max(1, len(record.requests))
    return Counts(
        steps=totals.decode_steps,
        kv_in_use=totals.kv_used_mean,
        future_required=monitor.peaks / max(1, monitor.admissions) / CAPACITY,
        preemptions=totals.preemptions / ended,
        recomputed_tokens=totals.recomputed_tokens,
        turned_away=monitor.turned_away / ended,
    )
