"""Baseline placements for comparison: even split (vLLM), and tight packing."""

from shoal.core.cluster import Device
from shoal.place.estimate import Found
from shoal.place.placement import Placement
from shoal.place.problem import Problem, Search


def even_split(problem: Problem) -> Search:
    """Every service has devices of its own, if possible equally many: nothing is shared (vLLM).

    Services that need several devices come first; the rest is split evenly, in powers of two.
    """
    placement = Placement.sharing(_even_parts(problem))
    [estimate] = yield [placement]
    return [Found(placement, estimate)]


def tight(problem: Problem) -> Search:
    """Services on few devices, largest first: each joins a group with room, or gets the fewest devices that
    fit."""
    placement = Placement.sharing(_tight_parts(problem))
    [estimate] = yield [placement]
    return [Found(placement, estimate)]


def _tight_parts(problem: Problem) -> list[tuple[tuple[Device, ...], list[str]]]:
    free = [list(pool) for pool in problem.pools]
    largest = max(len(pool) for pool in free)
    least = {
        name: problem.memory.least_tp(name, problem.cluster.devices, largest) or 1 for name in problem.rates
    }
    parts: list[tuple[tuple[Device, ...], list[str]]] = []
    for name in sorted(least, key=lambda name: (-least[name], name)):
        hosts = [part for part in parts if problem.fits([*part[1], name], part[0])]
        if hosts:
            hosts[0][1].append(name)
            continue
        devices = _take(free, least[name], name, problem)
        if devices is not None:
            parts.append((devices, [name]))
    return [*parts, *(((device,), []) for pool in free for device in pool)]


def _even_parts(problem: Problem) -> list[tuple[tuple[Device, ...], list[str]]]:
    free = [list(pool) for pool in problem.pools]
    largest = max(len(pool) for pool in free)
    every = problem.cluster.devices
    least = {name: problem.memory.least_tp(name, every, largest) or 1 for name in problem.rates}
    order = sorted(least, key=lambda name: (-least[name], name))
    parts: list[tuple[tuple[Device, ...], list[str]]] = []
    left = len(every)
    for at, name in enumerate(order):
        needed_later = sum(least[other] for other in order[at + 1 :])
        even = left // (len(order) - at)
        size = max(least[name], min(even, max(1, left - needed_later)))
        devices = _take(free, 1 << (size.bit_length() - 1), name, problem)
        if devices is not None:
            parts.append((devices, [name]))
            left -= len(devices)
    return [*parts, *(((device,), []) for pool in free for device in pool)]


def _take(free: list[list[Device]], count: int, name: str, problem: Problem) -> tuple[Device, ...] | None:
    """Take ``count`` devices of one host on which a service fits, or half as many, and so on.

    From the host with the fewest sufficient devices; None: there are none.
    """
    candidates = [pool for pool in free if len(pool) >= count and problem.fits([name], pool[:count])]
    if not candidates:
        return _take(free, count // 2, name, problem) if count > 1 else None
    pool = min(candidates, key=len)
    taken = tuple(pool[:count])
    del pool[:count]
    return taken
