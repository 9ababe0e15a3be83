"""Memory that requests need together: their present sizes, expected sizes, or the forecast peak."""

from collections.abc import Callable, Iterable, Mapping

from shoal.cluster.packing.items import Item

Need = Callable[[Iterable[Item]], int]
"""Memory that requests need together in one group; at least the sum of their sizes."""


def present(items: Iterable[Item]) -> int:
    """Sum of the present sizes."""
    return sum(item.size for item in items)


def reserve_mean(items: Iterable[Item]) -> int:
    """Sum of the expected final sizes, as if all were reached at once."""
    return sum(item.expected for item in items)


def forecast_peak(items: Iterable[Item]) -> int:
    """The forecast peak of their memory (Past-Future, section 3.2).

    All grow at the same rate, and each ends at its expected size. In order of falling growth, when request i
    ends, requests 1 to i hold the sum of their sizes and i times its growth.
    """
    total = most = 0
    for number, (growth, size) in enumerate(
        sorted(((item.growth, item.size) for item in items), reverse=True), start=1
    ):
        total += size
        most = max(most, total + number * growth)
    return most


NEEDS: Mapping[str, Need] = {"present": present, "reserve-mean": reserve_mean}
"""By name, as used by experiments."""
