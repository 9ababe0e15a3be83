"""Neighbours of a placement for local search: other services in groups; groups merged or split."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from shoal.core.cluster import Device
from shoal.place.placement import Placement
from shoal.place.problem import Problem

Part = tuple[tuple[Device, ...], tuple[str, ...]]
"""Devices and services of a group."""


Change = tuple[set[int], list[Part]]
"""Indices of removed groups, and added groups: arguments of ``Placement.changed``."""


def changes(problem: Problem, placement: Placement, near: Device | None = None) -> Iterator[Change]:
    """Changes of one or two groups, once per shape; near: only of the group with this device."""
    parts: list[Part] = [(group.devices, group.services) for group in placement.groups]
    singles = _representatives(parts)
    if near is not None:
        singles = [at for at, (devices, _) in enumerate(parts) if near in devices]
    for at in singles:
        for added in _single_changes(problem, parts[at]):
            if all(_allowed(problem, part) for part in added):
                yield {at}, added
    for first, second in _pairs(parts, near):
        for added in _pair_changes(problem, parts[first], parts[second]):
            if all(_allowed(problem, part) for part in added):
                yield {first, second}, added


def _single_changes(problem: Problem, part: Part) -> Iterator[list[Part]]:
    """Changes of one group: other services, or a split."""
    devices, services = part
    for name in problem.rates:
        if name not in services:
            yield [(devices, _ordered([*services, name]))]
            for old in services:
                yield [(devices, _ordered([*_without(services, old), name]))]
    for name in services:
        yield [(devices, _without(services, name))]
    if len(devices) > 1:
        half = len(devices) // 2
        sides = [()] + [side for size in range(1, len(services) + 1) for side in combinations(services, size)]
        for left, right in product(sides, sides):
            if set(left) | set(right) == set(services) and left >= right:
                yield [(devices[:half], left), (devices[half:], right)]


def _pair_changes(problem: Problem, first: Part, second: Part) -> Iterator[list[Part]]:
    """Changes of two groups: a service moves, two are swapped, or the groups are merged."""
    for (a_devices, a), (b_devices, b) in ((first, second), (second, first)):
        for name in a:
            if name not in b:
                yield [(a_devices, _without(a, name)), (b_devices, _ordered([*b, name]))]
    (a_devices, a), (b_devices, b) = first, second
    for mine, theirs in product(a, b):
        if mine not in b and theirs not in a:
            yield [
                (a_devices, _ordered([*_without(a, mine), theirs])),
                (b_devices, _ordered([*_without(b, theirs), mine])),
            ]
    if len(a_devices) == len(b_devices) and _host_and_kind(a_devices) == _host_and_kind(b_devices):
        union = _ordered({*a, *b})
        for services in combinations(union, min(len(union), problem.max_services)):
            yield [(a_devices + b_devices, services)]


def _allowed(problem: Problem, part: Part) -> bool:
    devices, services = part
    return not services or problem.fits(services, devices)


def _representatives(parts: Sequence[Part]) -> list[int]:
    seen: dict[object, int] = {}
    for at, part in enumerate(parts):
        seen.setdefault(_shape_key(part), at)
    return list(seen.values())


def _pairs(parts: Sequence[Part], near: Device | None) -> Iterator[tuple[int, int]]:
    """One pair of groups for each pair of shapes, in one host and in two."""
    seen = set()
    for first, second in combinations(range(len(parts)), 2):
        a, b = parts[first], parts[second]
        if near is not None and near not in a[0] and near not in b[0]:
            continue
        pair = (
            frozenset(((_shape_key(a), 0), (_shape_key(b), _shape_key(a) == _shape_key(b)))),
            _host_and_kind(a[0]) == _host_and_kind(b[0]),
        )
        if pair not in seen:
            seen.add(pair)
            yield first, second


def _shape_key(part: Part) -> tuple[str, int, int, tuple[str, ...]]:
    """Key of groups of equal shape."""
    devices, services = part
    return devices[0].kind, min(device.memory_bytes for device in devices), len(devices), services


def _host_and_kind(devices: Sequence[Device]) -> tuple[str, str]:
    return devices[0].host, devices[0].kind


def _ordered(services: Sequence[str] | set[str]) -> tuple[str, ...]:
    return tuple(sorted(services))


def _without(services: Sequence[str], name: str) -> tuple[str, ...]:
    return tuple(each for each in services if each != name)
