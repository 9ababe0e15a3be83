"""The default search: Algorithm 1 with merging, from several starts, polished by local search."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.core.cluster import ClusterSpec, Device
from shoal.place.baselines import even_split, tight
from shoal.place.estimate import Found, PlanEvaluator, best
from shoal.place.greedy import literal, merging
from shoal.place.neighbours import changes
from shoal.place.placement import Placement
from shoal.place.problem import Problem, Progress, Search, best_of, together

_STARTS, _STARTS_OF_MANY = 4, 2
"""Placements that are polished, at most; and where there are many devices, so that it takes long."""
_AT_ONCE = 64
"""Neighbours that are compared with each other before the best is taken."""
_SIMULATED_STARTS, _SCREENED_ROUNDS, _PROMISING = 3, 4, 8
"""Of a screened search: placements to begin with, rounds, and neighbours in a round."""
_WHOLE = 8
"""Up to so many devices, and at multiples of so many, a search begins anew."""


def search_literal(problem: Problem, evaluator: PlanEvaluator, progress: Progress | None = None) -> Found:
    """SeaLLM's Algorithm 1 as printed."""
    problem.memory.require(problem.cluster)
    return best_of(together(literal(problem), evaluator, progress), problem.objective)


def search(problem: Problem, evaluator: PlanEvaluator, progress: Progress | None = None) -> Found:
    """The best placement found.

    Devices are added one after the other in their order in the cluster: what was found for those before is
    changed only for the better, and at some numbers of them, and while some service has no group, a search
    begins anew. So devices that come behind the others never make it worse, whatever the evaluator says.
    """
    problem.memory.require(problem.cluster)
    devices = problem.cluster.devices
    found: Found | None = None
    for count, device in enumerate(devices, start=1):
        part = _of_first(problem, count)
        starts = [] if found is None else [_grown(part, evaluator, found, device)]
        homeless = found is None or found.placement.services != set(problem.rates)
        if count <= _WHOLE or count % _WHOLE == 0 or homeless:
            starts += _afresh(part, evaluator, starts)
        found = best(starts, problem.objective)
        if progress is not None:
            progress("placing services", count, len(devices))
    assert found is not None
    return found


def polish(problem: Problem, start: Found, near: Device | None = None) -> Search:
    """Go to better neighbours until there is none; near: look only at what this device's group could do."""
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
    """A search for an evaluator that takes long, such as a simulation.

    ``screen``, a quick one, searches; ``evaluator`` chooses among what that found and the best greedy
    placements, and improves the best of these by neighbours that look good to ``screen``.
    """
    results = [[search(problem, screen, progress)], *_greedy(problem, screen)]
    found = shortlisted(problem, results, evaluator)
    for round_ in range(_SCREENED_ROUNDS):
        if progress is not None:
            progress("improving the placement", round_, _SCREENED_ROUNDS)
        better = _screened_step(problem, screen, evaluator, found)
        if better is found:
            break
        found = better
    return found


def shortlisted(problem: Problem, results: Sequence[Sequence[Found]], evaluator: PlanEvaluator) -> Found:
    """The best, to ``evaluator``, of a few placements that were best to another, one of each search."""
    each = [best(result, problem.objective) for result in results if result]
    each.sort(key=lambda found: problem.objective.key(found.estimate), reverse=True)
    different = {str(found.placement): found.placement for found in each}
    tried = list(different.values())[:_SIMULATED_STARTS]
    return best(map(Found, tried, evaluator.evaluate(tried)), problem.objective)


def _screened_step(problem: Problem, screen: PlanEvaluator, evaluator: PlanEvaluator, found: Found) -> Found:
    """The best of a placement and its most promising neighbours."""
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
        each for each in together([*merging(problem), even_split(problem), tight(problem)], evaluator) if each
    ]


def _neighbours(
    problem: Problem, placement: Placement, near: Device | None, start: int
) -> Iterator[list[Placement]]:
    """All neighbours, some at a time, from place ``start`` on and around."""
    everything = list(changes(problem, placement, near))
    begin = start % max(1, len(everything))
    turned = everything[begin:] + everything[:begin]
    for at in range(0, len(turned), _AT_ONCE):
        yield [placement.changed(*change) for change in turned[at : at + _AT_ONCE]]


def _afresh(problem: Problem, evaluator: PlanEvaluator, also: Sequence[Found]) -> list[Found]:
    """Greedy placements, and ``also``, the best of them polished."""
    results = _greedy(problem, evaluator)
    key = problem.objective.key
    starts = sorted(
        [*also, *(best(result, problem.objective) for result in results)],
        key=lambda each: key(each.estimate),
        reverse=True,
    )
    few = len(problem.cluster.devices) <= _WHOLE
    searches = [polish(problem, start) for start in starts[: _STARTS if few else _STARTS_OF_MANY]]
    return [each for result in together(searches, evaluator) for each in result]


def _grown(problem: Problem, evaluator: PlanEvaluator, found: Found, device: Device) -> Found:
    """The placement with one more device, and what can be done with that."""
    parts = [(group.devices, group.services) for group in found.placement.groups]
    start = Found(Placement.sharing([*parts, ((device,), ())]), found.estimate)
    return best_of(together([polish(problem, start, device)], evaluator), problem.objective)


def _of_first(problem: Problem, count: int) -> Problem:
    """The same problem for the first devices of the cluster."""
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
