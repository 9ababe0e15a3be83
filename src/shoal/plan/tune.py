"""Tuning: hardware and workload are given, the scheduler is sought."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shoal.config.scenario_run import PreparedRun
from shoal.core import ConfigError
from shoal.plan.candidates import scheduler_candidates
from shoal.plan.confidence import Interval, mean_interval
from shoal.plan.halving import Ranked, rounds_of, successive_halving
from shoal.plan.outcomes import Outcomes
from shoal.plan.trial import Part, Trial, simulate, split
from shoal.schedule import SchedulerOptions
from shoal.simulate.parallel import Workers

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it, and of how much."""
LEAST_REQUESTS = 200
"""Requests that the first round has at least: fewer say little about who is best."""
_SHOWN = 3
_DECIDING = 0.25
"""Share of the part that is not held out, its latest requests, on which it is decided whether to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How far to look."""

    trials: int = 81
    """Schedulers in the first round."""
    share: float = 0.6
    """Of the workload that is searched on, and on which it is decided whether to change; the rest is held
    out."""
    seed: int = 0
    """Keys the schedulers that are drawn, and the resampling of requests."""
    processes: int | None = None
    """That simulate; None: one for each core."""

    def __post_init__(self) -> None:
        """Refuse numbers without meaning; raises ConfigError."""
        if self.trials < 2:
            raise ConfigError(f"a search needs at least 2 trials, got {self.trials}")
        if not 0 < self.share < 1:
            raise ConfigError(
                f"the share that is searched on must be above 0 and below 1, so that some is held out; got "
                f"{self.share:g}"
            )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A scheduler on the part that the search has not seen."""

    scheduler: SchedulerOptions
    """The scheduler."""
    outcomes: Outcomes
    """Of the requests of that part."""
    attainment: Interval
    """Share of goals met."""
    gain: Interval
    """How much better than the default's, request by request: its attainment, or where there are no goals its
    latency, as a share of the default's mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a search found."""

    rounds: Sequence[Ranked[SchedulerOptions]]
    """Its rounds."""
    searched: Part
    """What was searched on."""
    decided: Part
    """What comes behind it, on which the best of the last round was compared with the default."""
    held_out: Part
    """What comes last."""
    best: SchedulerOptions
    """The scheduler to take: the default, unless the best of the last round surely beat it there."""
    gain: Interval
    """How much smaller than the default's is the loss of the best of the last round, where it is decided."""
    table: Sequence[HeldOut]
    """The default first, then the best ones, as the last round ranked them."""


class Stopped(KeyboardInterrupt):
    """A search was interrupted; these are the rounds that were over, and what was searched on."""

    def __init__(self, rounds: Sequence[Ranked[SchedulerOptions]], searched: Part) -> None:
        super().__init__()
        self.rounds = rounds
        self.searched = searched


def tune(prepared: PreparedRun, search: Search, progress: Progress | None = None) -> Tuned:
    """Search a scheduler for the scenario by successive halving over growing parts of its workload.

    The default is the scenario's own scheduler, and takes part in every round. Raises ConfigError for a
    workload that is too small to be split, and Stopped where Ctrl-C ends it.
    """
    if len(prepared.requests) < 2 * LEAST_REQUESTS:
        raise ConfigError(
            f"tuning needs at least {2 * LEAST_REQUESTS} requests, got {len(prepared.requests)}: some to "
            "search on, and some to report on"
        )
    tell = progress or (lambda what, done, total: None)
    looked_at, held_out = split(len(prepared.requests), search.share)
    searched = looked_at.first(1 - _DECIDING)
    decided = Part(searched.stop, looked_at.stop)
    default = prepared.scenario.scheduler
    candidates = scheduler_candidates(default, search.trials, search.seed)
    ranked: list[Ranked[SchedulerOptions]] = []
    with Workers(prepared, search.processes) as workers:

        def evaluate(schedulers: Sequence[SchedulerOptions], share: float) -> Sequence[float]:
            part = searched.first(share)
            what = f"{len(schedulers)} schedulers on {len(part):,} requests"
            found = _simulate(workers, schedulers, part, partial(tell, what))
            return [each.loss for each in found]

        try:
            rounds = rounds_of(len(candidates), LEAST_REQUESTS / len(searched))
            for outcome in successive_halving(candidates, rounds, evaluate, always=[default]):
                ranked.append(outcome)
            best = ranked[-1].candidates[0]
            # Who was best of many was lucky, too: only requests that it was not chosen by tell how good.
            compared = _simulate(workers, [default, best], decided, partial(tell, "decision"))
            shown = [default, *(each for each in ranked[-1].candidates if each != default)][: _SHOWN + 1]
            later = _simulate(workers, shown, held_out, partial(tell, "held-out part"))
        except KeyboardInterrupt as interrupt:
            raise Stopped(ranked, searched) from interrupt
    losses = [each.losses for each in compared]
    gain = mean_interval(losses[0] - losses[1], np.random.default_rng(search.seed))
    return Tuned(
        rounds=ranked,
        searched=searched,
        decided=decided,
        held_out=held_out,
        best=best if gain.low > 0 else default,
        gain=gain,
        table=[
            _held_out(scheduler, found, later[0], search.seed)
            for scheduler, found in zip(shown, later, strict=True)
        ],
    )


def _simulate(
    workers: Workers[PreparedRun],
    schedulers: Sequence[SchedulerOptions],
    part: Part,
    tell: Callable[[int, int], None],
) -> list[Outcomes]:
    return workers.at_each(simulate, [Trial(scheduler, part) for scheduler in schedulers], tell)


def _held_out(scheduler: SchedulerOptions, found: Outcomes, default: Outcomes, seed: int) -> HeldOut:
    if math.isnan(default.attainment):
        scale = float(np.nanmean(default.latency))
        gains = (default.latency - found.latency) / scale
    else:
        gains = found.met - default.met
    return HeldOut(
        scheduler=scheduler,
        outcomes=found,
        attainment=mean_interval(found.met, np.random.default_rng(seed)),
        gain=mean_interval(gains, np.random.default_rng(seed)),
    )
