"""Exhaustive search over all placements, for small clusters and tests."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement, islice, product

from shoal.core import ConfigError
from shoal.core.cluster import Device
from shoal.place.estimate import Found, PlanEvaluator, best
from shoal.place.placement import Placement
from shoal.place.problem import Problem

MOST_PLACEMENTS = 300_000
_AT_ONCE = 4096

Parts = list[tuple[tuple[Device, ...], tuple[str, ...]]]


def search_exhaustive(problem: Problem, evaluator: PlanEvaluator) -> Found:
    """The best placement; raises ConfigError if there are more than ``MOST_PLACEMENTS``."""
    candidates = placements(problem)
    found: Found | None = None
    tried = 0
    while batch := list(islice(candidates, _AT_ONCE)):
        tried += len(batch)
        if tried > MOST_PLACEMENTS:
            raise ConfigError(f"there are more than {MOST_PLACEMENTS:,} placements; search another way")
        estimates = evaluator.evaluate(batch)
        nearby = [Found(placement, estimate) for placement, estimate in zip(batch, estimates, strict=True)]
        found = best([*([] if found is None else [found]), *nearby], problem.objective)
    assert found is not None
    return found


def placements(problem: Problem) -> Iterator[Placement]:
    """All placements into groups of powers of two, up to exchanges of equal devices."""
    for choice in product(*(list(_of_pool(problem, pool)) for pool in problem.pools)):
        yield Placement.sharing([part for parts in choice for part in parts])


def _of_pool(problem: Problem, pool: Sequence[Device]) -> Iterator[Parts]:
    for sizes in _partitions(len(pool), len(pool)):
        options = []
        for size, count in Counter(sizes).items():
            sets = [services for services in _sets(problem) if problem.fits(services, pool[:size])]
            options.append([(size, each) for each in combinations_with_replacement([(), *sets], count)])
        for choice in product(*options):
            devices = iter(pool)
            yield [(tuple(islice(devices, size)), services) for size, chosen in choice for services in chosen]


def _sets(problem: Problem) -> Iterator[tuple[str, ...]]:
    names = sorted(problem.rates)
    for size in range(1, min(problem.max_services, len(names)) + 1):
        yield from combinations(names, size)


def _partitions(count: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Powers of two with sum ``count``, in falling order."""
    if not count:
        yield ()
        return
    size = 1 << (min(count, largest).bit_length() - 1)
    while size:
        for rest in _partitions(count - size, size):
            yield (size, *rest)
        size //= 2
