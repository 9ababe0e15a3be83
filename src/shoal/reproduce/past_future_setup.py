"""What Past-Future's experiments share: its systems, and a full queue on one engine, watched from outside."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.core import Request, SamplingParams, SyntheticPrompt
from shoal.forecast import FittedTimes, LatencyModel, LengthHistory
from shoal.reproduce.result import Value
from shoal.schedule import (
    Admission,
    Conservative,
    Fcfs,
    Oracle,
    PastFuture,
    Scheduler,
    SchedulerOptions,
)
from shoal.schedule.belief import Belief, draws
from shoal.schedule.crowd import Crowd
from shoal.schedule.larger_crowd import LargerCrowd
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, Watch, token_layout
from shoal.workload import LENGTHS

PAPER = "Past-Future (Gong et al., 2025)"

IntArray = npt.NDArray[np.int64]

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
    """Conservative, where what is set aside need not be the limit at which outputs really end.

    assumed: output tokens set aside for each request, more once it has more.
    """

    assumed: int

    def demand(self, crowds: Sequence[Crowd]) -> float:
        """The sum of prompts and assumed outputs."""
        return sum(
            crowd.demand.total(np.maximum(crowd.members.prompts + self.assumed, crowd.demand.tokens))
            for crowd in crowds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPastFuture(PastFuture):
    """Past-Future in a service that has answered requests before.

    past: name of the distribution of lengths that fill its window; "" if it has just begun.
    """

    past: str = ""

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

    samples: M* is the largest of so many draws. A window without a past is full of the longest output.
    """

    samples: int = PUBLISHED_DRAWS
    cold_start: str = "max"
    draws: str = "max"

    def belief(self, crowds: Sequence[Crowd]) -> Belief:
        """As many draws as asked for."""
        return draws(self.samples)


def options_of(admission: Admission, victim: str = "newest") -> SchedulerOptions:
    """A system's scheduler: first come, first served, nobody preempted, none of our guards and limits.

    victim: ``newest`` in the paper's systems.
    """
    return SchedulerOptions(
        order=Fcfs(),
        admission=admission,
        victim=victim,
        preemption_mode="recompute",
        preempt_for_waiting=False,
        starvation_s=_NEVER_S,
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
    """One run of requests that all wait from the beginning.

    lengths: name of a distribution. longest: output tokens at which answers end. victim: policy's name.
    """

    lengths: str
    longest: int
    admission: Admission
    victim: str = "newest"
    requests: int = REQUESTS
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What the paper's table has of a run: shares of the capacity, and counts for each request.

    steps: those that decode. kv_in_use: mean over steps. future_required: mean, over the moments at which the
    queue is looked at, of the memory that those let in will need at once (M* of their true lengths).
    turned_away: how often for each request, at such a moment, the admission would have let in the first in
    line, for whose known tokens there was no room.
    """

    steps: int
    kv_in_use: float
    future_required: float
    evictions: float
    recomputed_tokens: int
    turned_away: float

    def metrics(self) -> dict[str, Value]:
        """Under the names that all of these experiments use."""
        return {
            "decoding_steps": self.steps,
            "kv_in_use": self.kv_in_use,
            "future_required": self.future_required,
            "evictions_per_request": self.evictions,
            "turned_away_per_request": self.turned_away,
            "recomputed_tokens": self.recomputed_tokens,
        }


class _Onlooker:
    """Sums up, at the moments at which the queue is looked at, what no record of a run has."""

    def __init__(self, scheduler: Scheduler, admission: Admission) -> None:
        self.moments = self.peaks = self.turned_away = 0
        self._group = scheduler.groups[_SERVICE]
        self._admission = admission
        self._truth = Oracle()
        scheduler.on_steps = self.note

    def note(self, first: int, steps: int) -> None:
        """Steps begin in which the same requests run, so that their peak stays the same."""
        moments = (first + steps - 1) // ADMIT_EVERY - (first - 1) // ADMIT_EVERY
        if not moments or not self._group.waiting:
            return
        crowd = self._group.crowd()
        self.moments += moments
        self.peaks += moments * int(self._truth.demand([crowd]))
        # Only overcommitment would let in whom there is no room for.
        if isinstance(self._admission, Conservative) and self._admission.overcommit > 1:
            joined = LargerCrowd(crowd, self._group.waiting[0], crowd.members.shared)
            self.turned_away += moments * (
                self._admission.demand([joined]) <= self._admission.limit(CAPACITY)
            )


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
        evictions=totals.evictions / run.requests,
        recomputed_tokens=totals.recomputed_tokens,
        turned_away=onlooker.turned_away / run.requests,
    )
