"""FetchLink: weights that come in virtual time, on a link of their own, while steps go on more slowly."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from shoal.core import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    """How long fetches of weights take, and how much longer steps take meanwhile."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of a fetch, by name of the weights."""
    slowdown: float = 1.0
    """Duration of a step while weights come, relative to one without; at least 1."""


class FetchLink:
    """The link on which weights come, one after the other; times in virtual nanoseconds."""

    def __init__(self, times: FetchTimes) -> None:
        self._times = times
        self._free_ns = 0
        self._coming: deque[tuple[int, Arrival]] = deque()

    def fetch(self, weights: str, now_ns: int) -> None:
        """Begin to fetch weights, behind those that are coming."""
        duration_ns = max(1, round(self._times.seconds[weights] * 1e9))
        self._free_ns = max(self._free_ns, now_ns) + duration_ns
        self._coming.append((self._free_ns, Arrival(weights, duration_ns / 1e9)))

    def next_arrival_ns(self, after_ns: int) -> int | None:
        """When weights come next, later than ``after_ns``; None: never."""
        return next((come_ns for come_ns, _ in self._coming if come_ns > after_ns), None)

    def has_arrival(self, now_ns: int) -> bool:
        """Whether ``take`` would return any."""
        return bool(self._coming) and self._coming[0][0] <= now_ns

    def take(self, now_ns: int) -> list[Arrival]:
        """Weights that have come since the last call, in order."""
        arrived = []
        while self.has_arrival(now_ns):
            arrived.append(self._coming.popleft()[1])
        return arrived

    def step_ends_ns(self, start_ns: int, durations_ns: Sequence[int]) -> list[int]:
        """When successive iterations end of which the first begins at ``start_ns``.

        They take longer while weights come.
        """
        slowdown, free_ns = self._times.slowdown, self._free_ns
        if slowdown == 1 or start_ns >= free_ns:
            return [start_ns + passed_ns for passed_ns in accumulate(durations_ns)]
        ends_ns = []
        for duration_ns in durations_ns:
            end_ns = start_ns + round(duration_ns * slowdown)
            if end_ns > free_ns:
                slowed_ns = max(free_ns - start_ns, 0)
                end_ns = start_ns + slowed_ns + max(1, round(duration_ns - slowed_ns / slowdown))
            ends_ns.append(end_ns)
            start_ns = end_ns
        return ends_ns
