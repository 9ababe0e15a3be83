"""Re-placement: when to place again, whether a change is worthwhile, and how it loads few weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core import ConfigError
from shoal.core.cluster import Device
from shoal.place.estimate import Estimate
from shoal.place.memory import MemoryCheck
from shoal.place.placement import Group, Placement

_TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRule:
    """Duration of a placement (SeaLLM, Eq. 8); raises ConfigError for invalid values."""

    first_s: float = 60.0
    least_s: float = 20.0
    most_s: float = 600.0
    beta: float = 0.1
    """Relative error of an estimate above which intervals shrink, and relative change of intervals."""

    def __post_init__(self) -> None:
        if not 0 < self.least_s <= self.first_s <= self.most_s or not 0 < self.beta < 1:
            raise ConfigError(f"intervals need 0 < least <= first <= most and beta in (0, 1), got {self}")

    def next_s(self, interval_s: float, estimated: Estimate, achieved: Estimate) -> float:
        """Length of the next interval: shorter if the estimate of this one was off, else longer."""
        pairs = [
            (estimated.attainment, achieved.attainment),
            (estimated.normalised_latency, achieved.normalised_latency),
        ]
        off = any(abs(real - guess) / max(guess, _TINY) > self.beta for guess, real in pairs)
        factor = 1 - self.beta if off else 1 + self.beta
        return min(self.most_s, max(self.least_s, interval_s * factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis:
    """Minimum gains for a change of placement (SeaLLM always changes)."""

    attainment: float = 0.02
    """Gain in attainment that suffices."""
    requests: float = 0.0
    """The least gain in requests that it is worth, however few there are."""
    latency: float = 0.15
    """Relative gain in normalised latency that suffices without a loss of attainment."""

    def worthwhile(self, now: Estimate, then: Estimate) -> bool:
        """now, then: estimates of the present and the other placement, on the same traffic."""
        gain = then.attainment - now.attainment
        if gain >= self.attainment and gain * now.total.requests >= self.requests - _TINY:
            return True
        faster = then.normalised_latency <= (1 - self.latency) * now.normalised_latency
        return gain >= 0 and faster


@dataclass(frozen=True, slots=True)
class Difference:
    """A change of placement and its cost."""

    after: Placement
    """The new placement, on the devices that minimize loading."""
    kept: tuple[Group, ...]
    """Its unchanged groups."""
    loads: Mapping[tuple[str, ...], tuple[str, ...]]
    """Services to load, by the device names of their new group."""
    load_bytes: int
    """Bytes of weights to load."""


def difference(before: Placement, after: Placement, memory: MemoryCheck) -> Difference:
    """Put the groups of ``after`` on devices so that few weights are loaded.

    Groups are matched with present ones of equal size by a maximum-weight assignment of kept bytes; the
    others get the remaining devices. If those do not form groups within hosts, the least useful matches are
    dropped.
    """
    matches = _matches(before, after, memory)
    while True:
        placed = _fit(before, after, dict(matches))
        if placed is not None:
            return _compared(before, placed, memory)
        if not matches:
            return _compared(before, after, memory)
        matches = matches[:-1]


def _matches(before: Placement, after: Placement, memory: MemoryCheck) -> list[tuple[int, Group]]:
    """(index in ``after``, present group whose devices it takes), by falling kept bytes."""
    from scipy.optimize import linear_sum_assignment  # a slow import

    found: list[tuple[float, int, Group]] = []
    shapes = {(group.devices[0].kind, group.tp) for group in after.groups}
    for shape in sorted(shapes):
        new = [at for at, group in enumerate(after.groups) if (group.devices[0].kind, group.tp) == shape]
        old = [group for group in before.groups if (group.devices[0].kind, group.tp) == shape]
        if not old:
            continue
        kept = np.array(
            [[_kept_bytes(group, after.groups[at], memory) for group in old] for at in new], dtype=float
        )
        for row, column in zip(*linear_sum_assignment(kept, maximize=True), strict=True):
            if kept[row, column] > 0:
                found.append((kept[row, column], new[row], old[column]))
    found.sort(key=lambda each: (-each[0], each[1]))
    return [(at, group) for _, at, group in found]


def _kept_bytes(old: Group, new: Group, memory: MemoryCheck) -> int:
    same = set(old.services) & set(new.services)
    # Prefer an unchanged group to one with equal kept weights.
    return sum(memory.services[name].model.weight_bytes() for name in same) + (old.services == new.services)


def _fit(before: Placement, after: Placement, matched: Mapping[int, Group]) -> Placement | None:
    """Place the groups of ``after``, matched ones on their devices; None: the others do not fit."""
    free: dict[tuple[str, str], list[Device]] = {}
    taken = {device.name for group in matched.values() for device in group.devices}
    for group in before.groups:
        for device in group.devices:
            if device.name not in taken:
                free.setdefault((device.host, device.kind), []).append(device)
    parts: list[tuple[tuple[Device, ...], tuple[str, ...]]] = []
    for at in sorted(range(len(after.groups)), key=lambda at: -after.groups[at].tp):
        group = after.groups[at]
        if at in matched:
            parts.append((matched[at].devices, group.services))
            continue
        kind = group.devices[0].kind
        candidates = [pool for (_, of), pool in free.items() if of == kind and len(pool) >= group.tp]
        if not candidates:
            return None
        pool = min(candidates, key=len)
        parts.append((tuple(pool[: group.tp]), group.services))
        del pool[: group.tp]
    return Placement.sharing(parts)


def _compared(before: Placement, after: Placement, memory: MemoryCheck) -> Difference:
    old = {_names(group): set(group.services) for group in before.groups}
    kept, loads, load_bytes = [], {}, 0
    for group in after.groups:
        there = old.get(_names(group))
        if there == set(group.services):
            kept.append(group)
            continue
        new = [name for name in group.services if there is None or name not in there]
        if new:
            loads[_names(group)] = tuple(new)
            load_bytes += _bytes(new, memory)
    return Difference(after, tuple(kept), loads, load_bytes)


def _names(group: Group) -> tuple[str, ...]:
    return tuple(sorted(device.name for device in group.devices))


def _bytes(services: Sequence[str], memory: MemoryCheck) -> int:
    return sum(memory.services[name].model.weight_bytes() for name in services)
