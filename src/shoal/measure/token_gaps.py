"""The times between tokens, over all tokens of a run."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_BINS_PER_DECADE = 200
_DECADES = 16
_BUFFERED = 1 << 16


class TokenGaps:
    """Times between neighbouring tokens of answers (inter-token latency), counted in bins.

    Bins are 1.2% wide, so that percentiles are right to 0.6%, and memory does not grow with the number of
    tokens. The mean is exact.
    """

    def __init__(self) -> None:
        self._counts: IntArray = np.zeros(_BINS_PER_DECADE * _DECADES, dtype=np.int64)
        self._total_ns = 0
        self._buffer: list[tuple[IntArray, int | IntArray]] = []
        self._buffered = 0

    def add(self, gaps_ns: IntArray, times: int | IntArray = 1) -> None:
        """Count gaps, each so many times; a gap of 0 is none."""
        self._buffer.append((gaps_ns, times))
        self._buffered += len(gaps_ns)
        if self._buffered > _BUFFERED:
            self._flush()

    def _flush(self) -> None:
        if not self._buffer:
            return
        gaps_ns = np.concatenate([gaps for gaps, _ in self._buffer])
        times = np.concatenate([np.full(len(gaps), times) for gaps, times in self._buffer])
        self._buffer, self._buffered = [], 0
        some = gaps_ns > 0
        gaps_ns, times = gaps_ns[some], times[some]
        self._total_ns += int(gaps_ns @ times)
        bins = (np.log10(gaps_ns) * _BINS_PER_DECADE).astype(np.int64)
        np.add.at(self._counts, bins, times)

    def __eq__(self, other: object) -> bool:
        """Whether the same was counted."""
        if not isinstance(other, TokenGaps):
            return NotImplemented
        return (len(self), self._total_ns) == (len(other), other._total_ns) and np.array_equal(
            self._counts, other._counts
        )

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        """Number of gaps."""
        self._flush()
        return int(self._counts.sum())

    @property
    def mean_s(self) -> float:
        """Arithmetic mean; there must be one."""
        return self._total_ns / len(self) / 1e9

    def percentile_s(self, percent: float) -> float:
        """Percentile (0 to 100), the middle of its bin; there must be a gap."""
        rank = (len(self) - 1) * percent / 100
        place = int(self._counts.cumsum().searchsorted(rank, side="right"))
        return float(10 ** ((place + 0.5) / _BINS_PER_DECADE) / 1e9)

    @classmethod
    def together(cls, several: Iterable["TokenGaps"]) -> "TokenGaps":
        """All gaps of several."""
        whole = cls()
        for gaps in several:
            gaps._flush()
            whole._counts += gaps._counts
            whole._total_ns += gaps._total_ns
        return whole
