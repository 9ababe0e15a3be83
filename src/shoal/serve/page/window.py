"""Increase of counters over the last seconds, and quantiles from the buckets of histograms."""

from collections import deque
from collections.abc import Mapping, Sequence

Key = tuple[str, str]
"""(counter, service or engine)."""
Totals = Mapping[Key, tuple[float, ...]]
"""Counters that never fall, by key; a key may have several, such as the buckets of a histogram."""


class RestartingCounters:
    """How much counters of several processes have grown, each of which may restart and then count from 0.

    A process may have counted for days when it is first seen, so it counts from its first sample.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, Key], float] = {}
        self._sums: dict[Key, float] = {}

    def add(self, source: str, counters: Mapping[Key, float]) -> None:
        """Take the present counters of one process."""
        for key, value in counters.items():
            last = self._last.get((source, key), value)
            self._last[source, key] = value
            self._sums[key] = self._sums.get(key, 0.0) + (value - last if value >= last else value)

    def totals(self) -> Totals:
        """The sums over all processes and their restarts, each in a tuple of its own."""
        return {key: (value,) for key, value in self._sums.items()}


class Window:
    """Samples of counters over the last ``length_s`` seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._samples: deque[tuple[float, Totals]] = deque()

    def add(self, time_s: float, totals: Totals) -> None:
        """Take a sample; times never fall."""
        self._samples.append((time_s, totals))
        while len(self._samples) > 2 and self._samples[1][0] <= time_s - self._length_s:
            self._samples.popleft()

    def increase(self, key: Key, last_s: float | None = None) -> tuple[float, ...]:
        """How much the counters of a key have grown in the last ``last_s`` seconds; None: in all of it.

        () if the key has no counters. A key that came later counts from its first sample.
        """
        if not self._samples:
            return ()
        newest = self._samples[-1][1].get(key, ())
        before = next(
            (totals[key] for _, totals in list(self._samples)[self._first(last_s) :] if key in totals), newest
        )
        return tuple(now - then for now, then in zip(newest, before, strict=True))

    def rate(self, key: Key, last_s: float) -> float:
        """Growth per second of a single counter over the last ``last_s`` seconds; 0 if nothing is known."""
        grown = self.increase(key, last_s)
        if not grown:
            return 0.0
        span_s = self._samples[-1][0] - self._samples[self._first(last_s)][0]
        return grown[0] / span_s if span_s > 0 else 0.0

    def _first(self, last_s: float | None) -> int:
        """Index of the latest sample that is at least ``last_s`` old, else of the oldest."""
        if last_s is None:
            return 0
        since_s = self._samples[-1][0] - last_s
        older = [number for number, (time_s, _) in enumerate(self._samples) if time_s <= since_s]
        return older[-1] if older else 0


def quantile(bounds: Sequence[float], cumulative: Sequence[float], share: float) -> float | None:
    """A quantile from a histogram, interpolated inside a bucket, as Prometheus' ``histogram_quantile`` does.

    bounds: upper bounds of the buckets, the last of them infinite. cumulative: observations up to each bound.
    share: in [0, 1]. None: there are no observations. In the last bucket its lower bound is returned.
    """
    total = cumulative[-1] if cumulative else 0
    if total <= 0:
        return None
    rank = share * total
    number = next(index for index, count in enumerate(cumulative) if count >= rank and count > 0)
    if number == len(bounds) - 1:
        return bounds[-2] if len(bounds) > 1 else None
    low = bounds[number - 1] if number else 0.0
    below = cumulative[number - 1] if number else 0.0
    inside = cumulative[number] - below
    return low + (bounds[number] - low) * (rank - below) / inside if inside else bounds[number]
