"""Trials: simulate a part of a scenario's requests with another scheduler; search and held-out parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.config.scenario_run import PreparedRun
from shoal.core import Request
from shoal.plan.outcomes import Outcomes, outcomes
from shoal.schedule import SchedulerOptions

_SAMPLE_S = 3600.0
"""Long, because samples of trials are not used."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive requests of a workload, from ``start`` to before ``stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def with_earlier(self, requests: Sequence[Request]) -> Sequence[Request]:
        """The part and all ``requests`` before it, with the first arrival at 0.

        Simulating only the part would begin with idle engines, which serve their first requests better.
        """
        first_ns = requests[0].arrival_ns
        return [
            replace(request, arrival_ns=request.arrival_ns - first_ns) for request in requests[: self.stop]
        ]

    def first(self, share: float) -> "Part":
        """The earliest requests of the part, at least one."""
        return Part(self.start, self.start + max(1, round(share * len(self))))


@dataclass(frozen=True, slots=True)
class Trial:
    """A scheduler to simulate on a part of the workload."""

    scheduler: SchedulerOptions
    part: Part


def split(requests: int, share: float) -> tuple[Part, Part]:
    """Split ``requests`` into the part to search on and the held-out, later part; neither is empty.

    share: of the first part, above 0 and below 1.
    """
    middle = min(max(1, round(share * requests)), requests - 1)
    return Part(0, middle), Part(middle, requests)


def simulate(prepared: PreparedRun, trial: Trial) -> Outcomes:
    """Simulate the scenario with the trial's scheduler; the outcomes are of the trial's part."""
    requests = trial.part.with_earlier(prepared.requests)
    run = replace(
        prepared,
        scenario=replace(prepared.scenario, sample_s=_SAMPLE_S),
        engine=replace(prepared.engine, scheduler=trial.scheduler),
        requests=requests,
    )
    return outcomes(run.run(), requests[trial.part.start :])
