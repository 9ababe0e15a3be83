"""Greedy placements: SeaLLM's Algorithm 1, AlpaServe's heuristic, MuxServe's greedy placement."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter

from shoal.core.cluster import Device
from shoal.place.estimate import Found, ServiceEstimate
from shoal.place.placement import Placement
from shoal.place.problem import Problem, Search

_index: Callable[[ServiceEstimate], float] = attrgetter("unserved_index")
_unserved: Callable[[ServiceEstimate], float] = attrgetter("unserved")

_FEW = 8
"""Up to so many services per group every number is tried."""


@dataclass(slots=True)
class _Part:
    devices: tuple[Device, ...]
    services: list[str]


def literal(problem: Problem) -> list[Search]:
    """SeaLLM's Algorithm 1 as printed: one search for every TP size and number of services per group.

    Each fills its groups until nothing more fits. A service that needs larger groups stays unplaced; merging
    groups is only in the paper's prose.
    """
    return [
        _fill(problem, _cut(problem, tp, whole=False), limit, _index, False)
        for tp, limit in _configurations(problem)
    ]


def merging(problem: Problem) -> list[Search]:
    """Algorithm 1 with the additions of its prose, and ours.

    Groups are merged for services that need more devices, leftover devices form smaller groups, and every
    intermediate placement is a result.
    """
    return [
        _fill(problem, _merged(problem, _cut(problem, tp, whole=True), limit), limit, _index, True)
        for tp, limit in _configurations(problem)
    ]


def alpaserve(problem: Problem) -> list[Search]:
    """AlpaServe's heuristic (Li et al., 2023, section 4.2): as ``merging``, by unserved requests only."""
    return [
        _fill(problem, _merged(problem, _cut(problem, tp, whole=True), limit), limit, _unserved, True)
        for tp, limit in _configurations(problem)
    ]


def _configurations(problem: Problem) -> list[tuple[int, int]]:
    return list(product(problem.tp_sizes, _limits(problem.max_services)))


def _limits(most: int) -> list[int]:
    """Numbers of services per group to try: all up to a few, then powers of two, and the most."""
    powers = [_FEW << step for step in range(most.bit_length())]
    return sorted({*range(1, min(most, _FEW) + 1), *(limit for limit in powers if limit < most), most})


def _cut(problem: Problem, tp: int, *, whole: bool) -> list[_Part]:
    """Every host's devices in groups of ``tp``; whole: leftover devices in smaller powers of two."""
    parts = []
    for pool in problem.pools:
        begin, size = 0, tp
        while begin < len(pool) and size:
            if begin + size <= len(pool):
                parts.append(_Part(tuple(pool[begin : begin + size]), []))
                begin += size
            else:
                size = size // 2 if whole else 0
    return parts


def _merged(problem: Problem, parts: list[_Part], limit: int) -> list[_Part]:
    """Merge groups pairwise until every service fits on one that is not taken by other large ones."""
    largest = max(len(pool) for pool in problem.pools)
    needs = [
        (problem.memory.least_tp(name, problem.cluster.devices, largest) or 1, name) for name in problem.rates
    ]
    room = [limit] * len(parts)
    for _, name in sorted(needs, reverse=True):
        while True:
            candidates = [
                at for at, part in enumerate(parts) if room[at] and problem.fits([name], part.devices)
            ]
            if candidates:
                # Small services need no reservation: many fit in a group.
                at = min(candidates, key=lambda at: len(parts[at].devices))
                room[at] -= len(parts[at].devices) > 1
                break
            if not _merge_two(parts, room, limit):
                break
    return parts


def _merge_two(parts: list[_Part], room: list[int], limit: int) -> bool:
    """Merge the two smallest equal groups of one host; False: there are none."""
    by_size: dict[tuple[int, str, str], list[int]] = {}
    for at, part in enumerate(parts):
        device = part.devices[0]
        if room[at] == limit:
            by_size.setdefault((len(part.devices), device.host, device.kind), []).append(at)
    pairs = [(size[0], places[:2]) for size, places in by_size.items() if len(places) > 1]
    if not pairs:
        return False
    first, second = min(pairs)[1]
    parts[first] = _Part(parts[first].devices + parts[second].devices, [])
    del parts[second], room[second]
    return True


def _fill(
    problem: Problem,
    parts: list[_Part],
    limit: int,
    badness: Callable[[ServiceEstimate], float],
    keep_all: bool,
) -> Search:
    """Add the worst-served service to the group with the fewest requests, until nothing fits."""
    kept = []
    while True:
        placement = _placement(parts)
        [estimate] = yield [placement]
        if keep_all:
            kept.append(Found(placement, estimate))
        worst_first = sorted(problem.rates, key=lambda name: -badness(estimate.services[name]))
        if not _place_one(problem, parts, placement, worst_first, limit):
            return kept or [Found(placement, estimate)]


def _place_one(
    problem: Problem, parts: Sequence[_Part], placement: Placement, worst_first: Sequence[str], limit: int
) -> bool:
    """One iteration of the inner loop; False: nothing fits."""
    shares = {group.devices: dict(group.shares) for group in placement.groups}

    def rate(part: _Part) -> float:
        return sum(problem.rates[name] * share for name, share in shares[part.devices].items())

    for part in sorted(parts, key=rate):
        if len(part.services) >= limit:
            continue
        for name in worst_first:
            if name not in part.services and problem.fits([*part.services, name], part.devices):
                part.services.append(name)
                return True
    return False


def _placement(parts: Sequence[_Part]) -> Placement:
    return Placement.sharing((part.devices, part.services) for part in parts)


def muxserve(problem: Problem, demands: Mapping[str, float]) -> list[Search]:
    """MuxServe's greedy placement in outline (Duan et al., 2024, section 3.2), for every group size.

    Each service is placed once, in order of falling demand, in the group with the least demand per device.
    demands: device seconds per second of a service's traffic.
    """
    return [
        _least_demand(problem, _merged(problem, _cut(problem, tp, whole=True), problem.max_services), demands)
        for tp in problem.tp_sizes
    ]


def _least_demand(problem: Problem, parts: list[_Part], demands: Mapping[str, float]) -> Search:
    for name in sorted(demands, key=lambda name: (-demands[name], name)):
        candidates = [part for part in parts if problem.fits([*part.services, name], part.devices)]
        if candidates:
            least = min(
                candidates, key=lambda part: sum(demands[each] for each in part.services) / len(part.devices)
            )
            least.services.append(name)
    placement = _placement(parts)
    [estimate] = yield [placement]
    return [Found(placement, estimate)]
