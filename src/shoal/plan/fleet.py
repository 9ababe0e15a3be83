"""Fleets (number of devices of each kind): cost, search of the cheapest one, Pareto frontier."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from shoal.core import ConfigError

Fleet = tuple[int, ...]
"""Devices of each kind, in the order of the kinds."""


@dataclass(frozen=True, slots=True)
class Stock:
    """Price and number of available devices of one kind."""

    price: float
    most: int


def cost(stock: Sequence[Stock], fleet: Fleet) -> float:
    # Rounded, because sums of decimal prices are not exact.
    return round(sum(kind.price * count for kind, count in zip(stock, fleet, strict=True)), 9)


def within(part: Fleet, fleet: Fleet) -> bool:
    """Whether ``fleet`` has all devices of ``part``."""
    return all(a <= b for a, b in zip(part, fleet, strict=True))


@dataclass(slots=True)
class _MonotoneCheck:
    """Caches which fleets are enough. More devices are never worse, so one result holds for many fleets."""

    is_enough: Callable[[Fleet], bool]
    enough: set[Fleet] = field(default_factory=set)
    short: set[Fleet] = field(default_factory=set)
    """Fleets that are not enough."""

    def __call__(self, fleet: Fleet) -> bool:
        if any(within(known, fleet) for known in self.enough):
            return True
        if any(within(fleet, known) for known in self.short):
            return False
        result = self.is_enough(fleet)
        (self.enough if result else self.short).add(fleet)
        return result


def cheapest(stock: Sequence[Stock], is_enough: Callable[[Fleet], bool]) -> Fleet | None:
    """The cheapest fleet that is enough, with fewest devices of equal cost; None if no fleet is.

    is_enough: must be monotone in the number of devices, and is called at most once for each fleet. First,
    bisection finds the smallest fleet of each kind alone; the cheapest of these bounds the cost of mixed
    fleets. Then, for each combination of the other kinds, bisection finds the number of the first kind.
    Raises ConfigError for no kinds.
    """
    if not stock:
        raise ConfigError("there are no devices to choose from")
    check = _MonotoneCheck(is_enough)
    best: Fleet | None = None
    for number in range(len(stock)):
        alone = tuple(kind.most if at == number else 0 for at, kind in enumerate(stock))
        best = _better(stock, best, _fewest(stock, check, alone, number, best))
    for others in sorted(_others(stock), key=lambda fleet: cost(stock, fleet)):
        largest = (stock[0].most, *others[1:])
        best = _better(stock, best, _fewest(stock, check, largest, 0, best))
    return best


def _others(stock: Sequence[Stock]) -> Iterator[Fleet]:
    yield from product((0,), *(range(kind.most + 1) for kind in stock[1:]))


def _fewest(
    stock: Sequence[Stock],
    check: _MonotoneCheck,
    largest: Fleet,
    number: int,
    best: Fleet | None,
) -> Fleet | None:
    """The smallest sufficient fleet that differs from ``largest`` only in kind ``number``.

    None if there is none better than ``best``.
    """

    def with_count(count: int) -> Fleet:
        return (*largest[:number], count, *largest[number + 1 :])

    high = largest[number]
    while high >= 0 and best is not None and _order(stock, with_count(high)) >= _order(stock, best):
        high -= 1
    if high < 0 or not any(with_count(high)) or not check(with_count(high)):
        return None
    low = 0 if any(with_count(0)) else 1
    while low < high:
        middle = (low + high) // 2
        if check(with_count(middle)):
            high = middle
        else:
            low = middle + 1
    return with_count(high)


def _better(stock: Sequence[Stock], best: Fleet | None, found: Fleet | None) -> Fleet | None:
    candidates = [fleet for fleet in (best, found) if fleet is not None]
    return min(candidates, key=lambda fleet: _order(stock, fleet), default=None)


def _order(stock: Sequence[Stock], fleet: Fleet) -> tuple[float, int]:
    return cost(stock, fleet), sum(fleet)


def smaller_by_one(fleet: Fleet) -> list[Fleet]:
    """The non-empty fleets with one device less."""
    fewer = [
        tuple(count - (at == number) for at, count in enumerate(fleet))
        for number in range(len(fleet))
        if fleet[number]
    ]
    return [each for each in fewer if any(each)]


def pareto(points: Mapping[Fleet, tuple[float, float]]) -> list[Fleet]:
    """The Pareto frontier of (cost, attainment) by fleet, by cost."""
    frontier: list[Fleet] = []
    best = -1.0
    for fleet, (_, attainment) in sorted(points.items(), key=lambda each: (each[1][0], -each[1][1])):
        if attainment > best:
            frontier.append(fleet)
            best = attainment
    return frontier
