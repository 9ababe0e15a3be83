"""Inter-token latencies: a histogram over all tokens of a run."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_BINS_PER_DECADE = 200
_DECADES = 16
_BUFFERED = 1 << 16


class InterTokenLatencies:
    """Histogram of the times between consecutive output tokens of requests.

    Bins are 1.2% wide, so percentiles are exact to 0.6%, and memory does not grow with the number of tokens.
    The mean is exact.
    """

    def __init__(self) -> None:
        self._counts: IntArray = np.zeros(_BINS_PER_DECADE * _DECADES, dtype=np.int64)
        self._total_ns = 0
        self._buffer: list[tuple[IntArray, int | IntArray]] = []
        self._buffered = 0

    def add(self, latencies_ns: IntArray, counts: int | IntArray = 1) -> None:
        """Add latencies with their counts; 0 is ignored."""
        self._buffer.append((latencies_ns, counts))
        self._buffered += len(latencies_ns)
        if self._buffered > _BUFFERED:
            self._flush()

    def _flush(self) -> None:
        if not self._buffer:
            return
        latencies_ns = np.concatenate([values for values, _ in self._buffer])
        counts = np.concatenate([np.full(len(values), counts) for values, counts in self._buffer])
        self._buffer, self._buffered = [], 0
        positive = latencies_ns > 0
        latencies_ns, counts = latencies_ns[positive], counts[positive]
        self._total_ns += int(latencies_ns @ counts)
        bins = (np.log10(latencies_ns) * _BINS_PER_DECADE).astype(np.int64)
        np.add.at(self._counts, bins, counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InterTokenLatencies):
            return NotImplemented
        return (len(self), self._total_ns) == (len(other), other._total_ns) and np.array_equal(
            self._counts, other._counts
        )

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        self._flush()
        return int(self._counts.sum())

    @property
    def mean_s(self) -> float:
        """Arithmetic mean; must not be empty."""
        return self._total_ns / len(self) / 1e9

    def percentile_s(self, percent: float) -> float:
        """Percentile (0 to 100), as the middle of its bin; must not be empty."""
        rank = (len(self) - 1) * percent / 100
        number = int(self._counts.cumsum().searchsorted(rank, side="right"))
        return float(10 ** ((number + 0.5) / _BINS_PER_DECADE) / 1e9)

    @classmethod
    def merge(cls, histograms: Iterable["InterTokenLatencies"]) -> "InterTokenLatencies":
        merged = cls()
        for each in histograms:
            each._flush()
            merged._counts += each._counts
            merged._total_ns += each._total_ns
        return merged
