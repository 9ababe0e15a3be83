"""Fleets: how many devices of each kind."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from shoal.core import ConfigError

Fleet = tuple[int, ...]
"""Devices of each kind, in the order of the kinds."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What can be bought of one kind."""

    price: float
    """Of one device."""
    most: int
    """How many there are."""


def cost(stock: Sequence[Stock], fleet: Fleet) -> float:
    """The price of all devices."""
    # Rounded, because prices are decimal and their sums are not.
    return round(sum(kind.price * count for kind, count in zip(stock, fleet, strict=True)), 9)


def within(less: Fleet, more: Fleet) -> bool:
    """Whether ``more`` has all devices that ``less`` has."""
    return all(a <= b for a, b in zip(less, more, strict=True))


@dataclass(slots=True)
class Known:
    """What is known of fleets: more devices are never worse, so one answer is an answer for many."""

    ask: Callable[[Fleet], bool]
    """Whether a fleet is enough; asked of each at most once."""
    enough: set[Fleet] = field(default_factory=set)
    """Fleets that are."""
    short: set[Fleet] = field(default_factory=set)
    """Fleets that are not."""

    def __call__(self, fleet: Fleet) -> bool:
        """Whether the fleet is enough."""
        if any(within(known, fleet) for known in self.enough):
            return True
        if any(within(fleet, known) for known in self.short):
            return False
        answer = self.ask(fleet)
        (self.enough if answer else self.short).add(fleet)
        return answer


def cheapest(stock: Sequence[Stock], ask: Callable[[Fleet], bool]) -> Fleet | None:
    """The cheapest fleet that is enough, of equally cheap ones that with fewest devices; None: none is.

    ask: whether a fleet is; where it is, all with more devices must be. First the fewest devices of each
    kind alone are found by bisection; what they cost bounds the mixed fleets, of which the number of the
    first kind is found by bisection for each number of the others.
    Raises ConfigError for no kinds.
    """
    if not stock:
        raise ConfigError("there are no devices to choose from")
    known = Known(ask)
    best: Fleet | None = None
    for number in range(len(stock)):
        alone = tuple(kind.most if at == number else 0 for at, kind in enumerate(stock))
        best = _better(stock, best, _fewest(stock, known, alone, number, best))
    for others in sorted(_others(stock), key=lambda fleet: cost(stock, fleet)):
        largest = (stock[0].most, *others[1:])
        best = _better(stock, best, _fewest(stock, known, largest, 0, best))
    return best


def _others(stock: Sequence[Stock]) -> Iterator[Fleet]:
    yield from product((0,), *(range(kind.most + 1) for kind in stock[1:]))


def _fewest(
    stock: Sequence[Stock], known: Known, largest: Fleet, number: int, best: Fleet | None
) -> Fleet | None:
    """The fewest devices of one kind beside those of the others in ``largest``; None: none, or too dear."""

    def with_count(count: int) -> Fleet:
        return (*largest[:number], count, *largest[number + 1 :])

    high = largest[number]
    while high >= 0 and best is not None and _order(stock, with_count(high)) >= _order(stock, best):
        high -= 1
    if high < 0 or not any(with_count(high)) or not known(with_count(high)):
        return None
    low = 0 if any(with_count(0)) else 1
    while low < high:
        middle = (low + high) // 2
        if known(with_count(middle)):
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
    """The fleets with one device less, that have any."""
    fewer = [
        tuple(count - (at == number) for at, count in enumerate(fleet))
        for number in range(len(fleet))
        if fleet[number]
    ]
    return [each for each in fewer if any(each)]


def pareto(points: Mapping[Fleet, tuple[float, float]]) -> list[Fleet]:
    """Of (cost, attainment) by fleet: those of which none cheaper or as cheap attains as much, by cost."""
    frontier: list[Fleet] = []
    best = -1.0
    for fleet, (_, attainment) in sorted(points.items(), key=lambda each: (each[1][0], -each[1][1])):
        if attainment > best:
            frontier.append(fleet)
            best = attainment
    return frontier
