"""The placement problem, and the generator protocol of searches (yield placements, get estimates)."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core import ConfigError
from shoal.core.cluster import ClusterSpec, Device
from shoal.place.estimate import Estimate, Found, Objective, PlanEvaluator, best
from shoal.place.memory import MemoryCheck, pools
from shoal.place.placement import Placement

Search = Generator[Sequence[Placement], Sequence[Estimate], list[Found]]
"""Yields placements, receives their estimates, and returns the results."""

Progress = Callable[[str, int, int | None], None]
"""Called with the present task, the work done, and the total if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Devices, services and the objective of a placement."""

    cluster: ClusterSpec
    memory: MemoryCheck
    rates: Mapping[str, float]
    max_services: int = 2
    """Limit on services per group."""
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        """Validate the fields."""
        if self.max_services < 1:
            raise ConfigError(f"a group has at least 1 service, got max_services {self.max_services}")
        if set(self.rates) != set(self.memory.services):
            raise ConfigError("every service needs a rate, and every rate a service")

    @property
    def pools(self) -> list[list[Device]]:
        return pools(self.cluster)

    @property
    def tp_sizes(self) -> list[int]:
        """Powers of two up to the size of the largest pool."""
        largest = max(len(pool) for pool in self.pools)
        return [1 << power for power in range(largest.bit_length())]

    def fits(self, services: Sequence[str], devices: Sequence[Device]) -> bool:
        """Whether services may share devices, by number and memory."""
        memory = min(device.memory_bytes for device in devices)
        return len(services) <= self.max_services and self.memory.fits(services, memory, len(devices))


def run_searches(
    searches: Sequence[Search],
    evaluator: PlanEvaluator,
    progress: Progress | None = None,
    what: str = "placing services",
) -> list[list[Found]]:
    """Run searches in lockstep, so that the evaluator gets large batches; returns the results of each."""
    results: list[list[Found]] = [[] for _ in searches]
    wanted: dict[int, Sequence[Placement]] = {}
    for number, each in enumerate(searches):
        _advance(number, each, None, wanted, results)
    while wanted:
        if progress is not None:
            progress(what, len(searches) - len(wanted), len(searches))
        pending = dict(wanted)
        estimates = iter(evaluator.evaluate([plan for plans in pending.values() for plan in plans]))
        for number, plans in pending.items():
            answers = [next(estimates) for _ in plans]
            _advance(number, searches[number], answers, wanted, results)
    if progress is not None:
        progress(what, len(searches), len(searches))
    return results


def _advance(
    number: int,
    search: Search,
    answers: Sequence[Estimate] | None,
    wanted: dict[int, Sequence[Placement]],
    results: list[list[Found]],
) -> None:
    try:
        wanted[number] = next(search) if answers is None else search.send(answers)
    except StopIteration as end:
        wanted.pop(number, None)
        results[number] = end.value


def best_of(results: Sequence[Sequence[Found]], objective: Objective) -> Found:
    """The best result of searches; raises ConfigError if there is none."""
    found = [each for result in results for each in result]
    if not found:
        raise ConfigError("no placement was found")
    return best(found, objective)
