"""Trials: a scenario's requests, or a part of them, served with another scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.config.scenario_run import PreparedRun
from shoal.core import Request
from shoal.plan.outcomes import Outcomes, outcomes
from shoal.schedule import SchedulerOptions

_SAMPLE_S = 3600.0
"""Nobody reads the samples of a trial."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive requests of a workload."""

    start: int
    """Number of the first."""
    stop: int
    """Number of the first that is not in it."""

    def __len__(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def with_earlier(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Those to simulate: the part behind all ``requests`` before it, the first of all at 0.

        An engine that begins empty serves its first requests better than all later ones.
        """
        first_ns = requests[0].arrival_ns
        return [
            replace(request, arrival_ns=request.arrival_ns - first_ns) for request in requests[: self.stop]
        ]

    def first(self, share: float) -> "Part":
        """The earliest of them, at least one."""
        return Part(self.start, self.start + max(1, round(share * len(self))))


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be tried."""

    scheduler: SchedulerOptions
    """Of every engine."""
    part: Part
    """Which requests arrive."""


def split(requests: int, share: float) -> tuple[Part, Part]:
    """The part of so many requests to search on, and the later part, held out; each has at least one.

    share: of the first, above 0 and below 1.
    """
    middle = min(max(1, round(share * requests)), requests - 1)
    return Part(0, middle), Part(middle, requests)


def simulate(prepared: PreparedRun, trial: Trial) -> Outcomes:
    """Simulate the trial; what is not in it is as the scenario says."""
    requests = trial.part.with_earlier(prepared.requests)
    run = replace(
        prepared,
        scenario=replace(prepared.scenario, sample_s=_SAMPLE_S),
        engine=replace(prepared.engine, scheduler=trial.scheduler),
        requests=requests,
    )
    return outcomes(run.run(), requests[trial.part.start :])
