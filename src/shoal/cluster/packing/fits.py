"""When requests fit into a group: which of their sizes is believed."""

from collections.abc import Callable, Iterable, Mapping

from shoal.cluster.packing.items import Item

Need = Callable[[Iterable[Item]], int]
"""Memory that requests need together in one group; at least the sum of their sizes."""


def present(items: Iterable[Item]) -> int:
    """What they hold now."""
    return sum(item.size for item in items)


def reserve_mean(items: Iterable[Item]) -> int:
    """What each is expected to grow to, as if all did at the same time."""
    return sum(item.expected for item in items)


def forecast_peak(items: Iterable[Item]) -> int:
    """The most that they need at any time (Past-Future, section 3.2).

    They grow alike, and each ends when it has reached its expected size: with the longest growth first,
    request i ends when those up to it hold the sum of their sizes and i times its growth.
    """
    total = most = 0
    for number, (growth, size) in enumerate(
        sorted(((item.growth, item.size) for item in items), reverse=True), start=1
    ):
        total += size
        most = max(most, total + number * growth)
    return most


NEEDS: Mapping[str, Need] = {"present": present, "reserve-mean": reserve_mean}
"""Readings of "fits", by the name that experiments use."""
