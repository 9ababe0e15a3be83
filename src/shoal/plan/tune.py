"""Tuning (``shoal tune``): search of the best scheduler for given hardware and workload, by simulation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shoal.config.scenario_run import PreparedRun
from shoal.core import ConfigError
from shoal.plan.candidates import scheduler_candidates
from shoal.plan.confidence import Interval, mean_interval
from shoal.plan.halving import Ranked, plan_rounds, successive_halving
from shoal.plan.outcomes import Outcomes
from shoal.plan.trial import Part, Trial, simulate, split
from shoal.schedule import SchedulerOptions
from shoal.simulate.parallel import Workers

Progress = Callable[[str, int, int | None], None]
"""Callback with the task, amount done, and total."""
MIN_REQUESTS = 200
"""Requests of the first round, at least: fewer do not rank schedulers reliably."""
_SHOWN = 3
_DECISION_SHARE = 0.25
"""Share of the requests that are not held out, the latest, on which the best is compared with the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Extent of the search; raises ConfigError for numbers out of range."""

    trials: int = 81
    """Schedulers in the first round."""
    share: float = 0.6
    """Share of the workload for search and decision; the rest is held out."""
    seed: int = 0
    """Seed of random schedulers and of the bootstrap."""
    processes: int | None = None
    """Processes that simulate; None: one for each core."""

    def __post_init__(self) -> None:
        if self.trials < 2:
            raise ConfigError(f"a search needs at least 2 trials, got {self.trials}")
        if not 0 < self.share < 1:
            raise ConfigError(
                f"the share that is searched on must be above 0 and below 1, so that some is held out; got "
                f"{self.share:g}"
            )


@dataclass(frozen=True, slots=True)
class HeldOutScheduler:
    """A scheduler on the held-out, later requests."""

    scheduler: SchedulerOptions
    outcomes: Outcomes
    attainment: Interval
    """Share of the requests that met their goals."""
    gain: Interval
    """Improvement over the default, paired by request: of attainment or, without goals, of latency as a share
    of the default's mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """The result of a search."""

    rounds: Sequence[Ranked[SchedulerOptions]]
    searched: Part
    """The requests of the rounds."""
    decided: Part
    """Later requests, on which the best of the last round was compared with the default."""
    held_out: Part
    """The latest requests."""
    best: SchedulerOptions
    """The default, unless the best of the last round was better on ``decided`` with confidence."""
    gain: Interval
    """Decrease of the loss from the default to the best of the last round, on ``decided``."""
    table: Sequence[HeldOutScheduler]
    """The default, then the best schedulers of the last round, in its order."""


class Stopped(KeyboardInterrupt):
    """A search was interrupted; has the finished rounds and the requests of the search."""

    def __init__(self, rounds: Sequence[Ranked[SchedulerOptions]], searched: Part) -> None:
        super().__init__()
        self.rounds = rounds
        self.searched = searched


def tune(prepared: PreparedRun, search: Search, progress: Progress | None = None) -> TuningResult:
    """Search a scheduler for the scenario by successive halving over growing parts of its workload.

    The default is the scenario's own scheduler; it is in every round. Raises ConfigError for a workload that
    is too small to be split, and Stopped on Ctrl-C.
    """
    if len(prepared.requests) < 2 * MIN_REQUESTS:
        raise ConfigError(
            f"tuning needs at least {2 * MIN_REQUESTS} requests, got {len(prepared.requests)}: some to "
            "search on, and some to report on"
        )
    report = progress or (lambda what, done, total: None)
    not_held_out, held_out = split(len(prepared.requests), search.share)
    searched = not_held_out.first(1 - _DECISION_SHARE)
    decided = Part(searched.stop, not_held_out.stop)
    default = prepared.scenario.scheduler
    slices = prepared.engine.weights.memory_bytes is None
    candidates = scheduler_candidates(default, search.trials, search.seed, slices=slices)
    ranked: list[Ranked[SchedulerOptions]] = []
    with Workers(prepared, search.processes) as workers:

        def evaluate(schedulers: Sequence[SchedulerOptions], share: float) -> Sequence[float]:
            part = searched.first(share)
            what = f"{len(schedulers)} schedulers on {len(part):,} requests"
            found = _simulate(workers, schedulers, part, partial(report, what))
            return [each.loss for each in found]

        try:
            rounds = plan_rounds(len(candidates), MIN_REQUESTS / len(searched))
            for outcome in successive_halving(candidates, rounds, evaluate, always=[default]):
                ranked.append(outcome)
            best = ranked[-1].candidates[0]
            # The best of many was partly lucky: only requests outside of the search show how good it is.
            compared = _simulate(workers, [default, best], decided, partial(report, "decision"))
            shown = [default, *(each for each in ranked[-1].candidates if each != default)][: _SHOWN + 1]
            later = _simulate(workers, shown, held_out, partial(report, "held-out part"))
        except KeyboardInterrupt as interrupt:
            raise Stopped(ranked, searched) from interrupt
    losses = [each.losses for each in compared]
    gain = mean_interval(losses[0] - losses[1], np.random.default_rng(search.seed))
    return TuningResult(
        rounds=ranked,
        searched=searched,
        decided=decided,
        held_out=held_out,
        best=best if gain.low > 0 else default,
        gain=gain,
        table=[
            _evaluate_held_out(scheduler, found, later[0], search.seed)
            for scheduler, found in zip(shown, later, strict=True)
        ],
    )


def _simulate(
    workers: Workers[PreparedRun],
    schedulers: Sequence[SchedulerOptions],
    part: Part,
    report: Callable[[int, int], None],
) -> list[Outcomes]:
    return workers.at_each(simulate, [Trial(scheduler, part) for scheduler in schedulers], report)


def _evaluate_held_out(
    scheduler: SchedulerOptions, found: Outcomes, default: Outcomes, seed: int
) -> HeldOutScheduler:
    if math.isnan(default.attainment):
        scale = float(np.nanmean(default.latency))
        gains = (default.latency - found.latency) / scale
    else:
        gains = found.met - default.met
    return HeldOutScheduler(
        scheduler=scheduler,
        outcomes=found,
        attainment=mean_interval(found.met, np.random.default_rng(seed)),
        gain=mean_interval(gains, np.random.default_rng(seed)),
    )
