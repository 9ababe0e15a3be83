"""The default placement search: greedy starts (Algorithm 1 with merging), improved by local search."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.core.cluster import ClusterSpec, Device
from shoal.place.baselines import even_split, tight
from shoal.place.estimate import Found, PlanEvaluator, best
from shoal.place.greedy import literal, merging
from shoal.place.neighbours import changes
from shoal.place.placement import Placement
from shoal.place.problem import Problem, Progress, Search, best_of, run_searches

_MANY_SERVICES, _MOST_NEIGHBOURS = 32, 400
"""With more services than this, that many of the neighbours of a placement are looked at, evenly spread."""
_STARTS, _STARTS_OF_MANY = 4, 2
"""Limits on starts for the local search, with few and with many devices or services."""
_AT_ONCE = 64
"""Neighbours evaluated before the best is taken."""
_SIMULATED_STARTS, _SCREENED_ROUNDS, _PROMISING = 3, 4, 8
"""Of a screened search: starts, rounds, and neighbours per round."""
_WHOLE = 8
"""A new search starts up to this many devices, and at multiples of it."""


def search_literal(problem: Problem, evaluator: PlanEvaluator, progress: Progress | None = None) -> Found:
    problem.memory.require(problem.cluster)
    return best_of(run_searches(literal(problem), evaluator, progress), problem.objective)


def search(problem: Problem, evaluator: PlanEvaluator, progress: Progress | None = None) -> Found:
    """The best placement found.

    Devices are added one by one in cluster order, and the placement is only changed for the better. At some
    numbers of devices, and while a service has no group, a search from scratch competes. So additional
    devices never make the result worse, with any evaluator.
    """
    problem.memory.require(problem.cluster)
    devices = problem.cluster.devices
    found: Found | None = None
    for count, device in enumerate(devices, start=1):
        part = _of_first(problem, count)
        starts = [] if found is None else [_with_one_more_device(part, evaluator, found, device)]
        unplaced = found is None or found.placement.services != set(problem.rates)
        if count <= _WHOLE or count % _WHOLE == 0 or unplaced:
            starts += _from_scratch(part, evaluator, starts)
        found = best(starts, problem.objective)
        if progress is not None:
            progress("placing services", count, len(devices))
    assert found is not None
    return found


def local_search(problem: Problem, start: Found, near: Device | None = None) -> Search:
    """Local search until no neighbour is better; near: only changes of the group with this device."""
    found = start
    tried = 0
    while True:
        for chunk in _neighbours(problem, found.placement, near, tried):
            estimates = yield chunk
            nearby = [
                Found(placement, estimate) for placement, estimate in zip(chunk, estimates, strict=True)
            ]
            better = best([found, *nearby], problem.objective)
            tried += len(chunk)
            if better is not found:
                found = better
                break
        else:
            return [found]


def search_screened(
    problem: Problem, screen: PlanEvaluator, evaluator: PlanEvaluator, progress: Progress | None = None
) -> Found:
    """A search for a slow evaluator, such as a simulation.

    The fast ``screen`` searches. ``evaluator`` chooses among its result and the best greedy placements, and
    improves the best by neighbours that ``screen`` rates highly.
    """
    results = [[search(problem, screen, progress)], *_greedy(problem, screen)]
    found = shortlisted(problem, results, evaluator)
    for round_ in range(_SCREENED_ROUNDS):
        if progress is not None:
            progress("improving the placement", round_, _SCREENED_ROUNDS)
        better = _screened_round(problem, screen, evaluator, found)
        if better is found:
            break
        found = better
    return found


def shortlisted(problem: Problem, results: Sequence[Sequence[Found]], evaluator: PlanEvaluator) -> Found:
    """The best by ``evaluator`` of a few placements, the best one of each search."""
    each = [best(result, problem.objective) for result in results if result]
    each.sort(key=lambda found: problem.objective.key(found.estimate), reverse=True)
    different = {str(found.placement): found.placement for found in each}
    tried = list(different.values())[:_SIMULATED_STARTS]
    return best(map(Found, tried, evaluator.evaluate(tried)), problem.objective)


def _screened_round(problem: Problem, screen: PlanEvaluator, evaluator: PlanEvaluator, found: Found) -> Found:
    """The best of a placement and its neighbours that ``screen`` rates highest."""
    nearby = [plan for chunk in _neighbours(problem, found.placement, None, 0) for plan in chunk]
    screened = sorted(
        map(Found, nearby, screen.evaluate(nearby)),
        key=lambda each: problem.objective.key(each.estimate),
        reverse=True,
    )
    promising = [each.placement for each in screened[:_PROMISING]]
    return best([found, *map(Found, promising, evaluator.evaluate(promising))], problem.objective)


def _greedy(problem: Problem, evaluator: PlanEvaluator) -> list[list[Found]]:
    return [
        each
        for each in run_searches([*merging(problem), even_split(problem), tight(problem)], evaluator)
        if each
    ]


def _neighbours(
    problem: Problem, placement: Placement, near: Device | None, start: int
) -> Iterator[list[Placement]]:
    """Neighbours in chunks, starting at index ``start`` and wrapping around; if there are many, a part."""
    every = list(changes(problem, placement, near))
    many = len(problem.rates) > _MANY_SERVICES
    stride = max(1, -(-len(every) // _MOST_NEIGHBOURS)) if many else 1
    neighbours = every[start % stride :: stride]
    begin = start % max(1, len(neighbours))
    rotated = neighbours[begin:] + neighbours[:begin]
    for at in range(0, len(rotated), _AT_ONCE):
        yield [placement.changed(*change) for change in rotated[at : at + _AT_ONCE]]


def _from_scratch(problem: Problem, evaluator: PlanEvaluator, also: Sequence[Found]) -> list[Found]:
    """Greedy placements and ``also``, the best of them improved by local search."""
    results = _greedy(problem, evaluator)
    key = problem.objective.key
    starts = sorted(
        [*also, *(best(result, problem.objective) for result in results)],
        key=lambda each: key(each.estimate),
        reverse=True,
    )
    few = len(problem.cluster.devices) <= _WHOLE and len(problem.rates) <= _MANY_SERVICES
    searches = [local_search(problem, start) for start in starts[: _STARTS if few else _STARTS_OF_MANY]]
    return [each for result in run_searches(searches, evaluator) for each in result]


def _with_one_more_device(problem: Problem, evaluator: PlanEvaluator, found: Found, device: Device) -> Found:
    """The placement with one more device, improved by local search."""
    parts = [(group.devices, group.services) for group in found.placement.groups]
    start = Found(Placement.sharing([*parts, ((device,), ())]), found.estimate)
    return best_of(run_searches([local_search(problem, start, device)], evaluator), problem.objective)


def _of_first(problem: Problem, count: int) -> Problem:
    """The problem restricted to the first devices of the cluster."""
    cluster = problem.cluster
    devices = cluster.devices[:count]
    names = {device.name for device in devices}
    pairs = {pair: link for pair, link in cluster.pairs.items() if pair <= names}
    return replace(
        problem,
        cluster=ClusterSpec(
            devices=devices, host_link=cluster.host_link, network=cluster.network, pairs=pairs
        ),
    )
