"""Formulas of the wait for weights on devices that do not hold the weights of all of their services."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BUSIEST = 0.98
"""Limit on the share of the time in which weights come."""
_HALVINGS = 24


@dataclass(frozen=True, slots=True)
class WeightsLoad:
    """Requests for some weights."""

    num_bytes: int
    requests_per_s: float
    pinned: bool = False


def fetch_waits_s(loads: Sequence[WeightsLoad], limit_bytes: int, bytes_per_s: float) -> list[float]:
    """Mean wait of a request for each of these weights, of which ``limit_bytes`` fit into memory.

    Weights stay for a time after a request, which is the same for all: that in which the memory holds those
    with a request in it (Che, Tung and Wang, "Hierarchical Web Caching Systems", 2002). A request later than
    that waits for a fetch, and for fetches of others, one after the other.
    """
    others = [load for load in loads if not load.pinned]
    room = limit_bytes - sum(load.num_bytes for load in loads if load.pinned)
    stay_s = _stay_s(others, room)
    absent = {load: math.exp(-load.requests_per_s * stay_s) for load in others}
    fetches_per_s = sum(load.requests_per_s * absent[load] for load in others)
    busy = sum(load.requests_per_s * absent[load] * load.num_bytes for load in others) / bytes_per_s
    queue_s = 0.0
    if fetches_per_s:
        share = min(busy, _BUSIEST)
        queue_s = share / (1 - share) * busy / fetches_per_s
    return [absent.get(load, 0.0) * (load.num_bytes / bytes_per_s + queue_s) for load in loads]


def _stay_s(loads: Sequence[WeightsLoad], room: int) -> float:
    """The time in which requests for ``room`` bytes of different weights come; infinite if all fit."""

    def asked_bytes(seconds: float) -> float:
        return sum(load.num_bytes * -math.expm1(-load.requests_per_s * seconds) for load in loads)

    if sum(load.num_bytes for load in loads) <= room:
        return math.inf
    high = 1.0
    while asked_bytes(high) < room:
        high *= 2
        if high > 1e12:
            return high
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if asked_bytes(middle) < room else (low, middle)
    return low
