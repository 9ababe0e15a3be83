"""History of output lengths of a service, and the distribution of lengths of unfinished requests.

Past-Future scheduler (Gong et al., section 3.2): the output length of a request that has generated d tokens
is predicted from the recent lengths greater than d.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from shoal.core import ConfigError
from shoal.forecast.draws import Seeds, counters, derive_seeds, uniforms

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_MAX_INSERTIONS = 4
"""With more new lengths than this, sorting all is faster than inserting each."""

_MIN_COMPUTED = 1024
"""With fewer targets than this, a binary search is faster than computing the indices."""

COLD_STARTS = ("kaplan-meier", "max")
"""Possible values of ``LengthHistory``'s ``cold_start``."""

_BEYOND_ALL: IntArray = np.array([np.iinfo(np.int64).max])


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of output lengths. Remaining probability is at the request's own maximum."""

    lengths: IntArray
    """Possible lengths [n], sorted; may repeat."""
    masses: FloatArray
    """Cumulative probabilities [n + 1]: 0, then P(length <= lengths[i])."""
    equal_masses: bool = False
    """Whether ``masses`` are i / n."""

    @property
    def cumulative(self) -> FloatArray:
        """P(length <= lengths[i])."""
        return self.masses[1:]

    @cached_property
    def _outcomes(self) -> IntArray:
        """The lengths, then a sentinel for a request's maximum."""
        return np.concatenate((self.lengths, _BEYOND_ALL))

    @cached_property
    def _weighted(self) -> FloatArray:
        """Cumulative sums of length times probability [n + 1], from 0."""
        mass = self.cumulative - self.masses[:-1]
        return np.concatenate((np.zeros(1), np.cumsum(mass * self.lengths)))

    def _mass_until(self, tokens: IntArray) -> FloatArray:
        """P(length <= tokens)."""
        return self.masses.take(self.lengths.searchsorted(tokens, side="right"))

    def _indices(self, targets: FloatArray) -> IntArray:
        """``cumulative.searchsorted(targets, side="right")``; faster for many targets and equal masses."""
        size = len(self.lengths)
        if not self.equal_masses or targets.size < _MIN_COMPUTED:
            return self.cumulative.searchsorted(targets, side="right")
        indices: IntArray = (targets * size).astype(np.int64)
        np.minimum(indices, size - 1, out=indices)
        # Correct rounding errors at steps.
        indices -= self.masses.take(indices) > targets
        indices += self.masses.take(indices + 1) <= targets
        return indices

    def draw(self, seeds: Seeds, generated: IntArray, max_new_tokens: IntArray, samples: int) -> IntArray:
        """Sampled output lengths [samples, n] of requests that have generated ``generated`` tokens [n].

        Each is drawn from the lengths greater than that and capped at ``max_new_tokens`` [n]; without a
        greater length it is ``max_new_tokens``. A draw depends only on (seed, generated, sample).
        """
        keys = derive_seeds(derive_seeds(seeds, generated), counters(samples))
        past = self._mass_until(generated)
        targets = uniforms(keys)
        targets *= 1.0 - past
        targets += past
        drawn = self._outcomes.take(self._indices(targets))
        return np.minimum(drawn, max_new_tokens, out=drawn)

    def mean_beyond(self, generated: IntArray, max_new_tokens: IntArray) -> FloatArray:
        """Mean of what ``draw`` samples from [n]."""
        weighted = self._weighted
        low = self.lengths.searchsorted(generated, side="right")
        high = self.lengths.searchsorted(max_new_tokens, side="right")
        left = 1.0 - self._mass_until(generated)
        beyond = 1.0 - self._mass_until(max_new_tokens)
        mean = max_new_tokens.astype(np.float64)
        total = weighted[np.maximum(high, low)] - weighted[low] + beyond * max_new_tokens
        return np.divide(total, left, out=mean, where=left > 0)


class LengthHistory:
    """Output lengths of one service's last ``window`` finished requests.

    maximum: longest output that the service allows.
    cold_start: the estimate until the window is full for the first time. "max": the window starts full of
        ``maximum`` (as in the paper), and each finished request replaces one entry. "kaplan-meier": Kaplan
        and Meier's estimator (1958) with finished requests as events and running ones as censored
        observations, because the first requests to finish are short; the remaining probability is at the
        maximum. A full window is used directly: in steady state it is an unbiased sample.
    """

    def __init__(self, maximum: int, window: int = 1000, cold_start: str = "kaplan-meier") -> None:
        if window < 1:
            raise ConfigError(f"a length history's window must be at least 1 request, got {window}")
        if cold_start not in COLD_STARTS:
            raise ConfigError(
                f"cold_start {cold_start!r} is not known; possible are {', '.join(COLD_STARTS)}"
            )
        self.window = window
        filled = cold_start == "max"
        self._recent: deque[int] = deque([maximum] * window if filled else (), maxlen=window)
        self._sorted: IntArray = np.array(self._recent, dtype=np.int64)
        # (dropped length or None, new length) of records that are not in ``_sorted`` yet. Not complete beyond
        # ``_MAX_INSERTIONS``, when all lengths are sorted again.
        self._pending: list[tuple[int | None, int]] = []
        self._finished: FinishedLengths | None = None
        self._full: LengthDistribution | None = None
        self._total = sum(self._recent)

    @property
    def censors(self) -> bool:
        """Whether running requests count as censored observations (before the window is full)."""
        return len(self._recent) < self.window

    @property
    def mean(self) -> float | None:
        """Mean of the recorded lengths; None before the first."""
        return self._total / len(self._recent) if self._recent else None

    def record(self, length: int) -> None:
        """Add the output length of a finished request (not of cancelled or failed ones)."""
        if length < 1:
            raise ValueError(f"a finished request has at least 1 output token, got {length}")
        dropped = self._recent[0] if len(self._recent) == self.window else None
        self._recent.append(length)
        self._total += length - (dropped or 0)
        if len(self._pending) <= _MAX_INSERTIONS:
            self._pending.append((dropped, length))
        self._finished = self._full = None

    def _ascending(self) -> IntArray:
        """The recorded lengths, sorted."""
        if len(self._pending) > _MAX_INSERTIONS:
            self._sorted = np.sort(np.array(self._recent, dtype=np.int64))
        else:
            for dropped, length in self._pending:
                lengths = self._sorted
                if dropped is None:
                    self._sorted = _inserted(lengths, length)
                else:
                    self._sorted = _replaced(lengths, dropped, length)
        self._pending.clear()
        return self._sorted

    def distribution(self, generated: IntArray) -> LengthDistribution:
        """The current estimate; generated: output tokens of the running requests so far."""
        if self.censors:
            if self._finished is None:
                self._finished = FinishedLengths.of(self._ascending())
            return kaplan_meier(self._finished, generated)
        if self._full is None:
            self._full = LengthDistribution(self._ascending(), _equal_masses(self.window), equal_masses=True)
        return self._full


@lru_cache(maxsize=16)
def _equal_masses(lengths: int) -> FloatArray:
    """``LengthDistribution.masses`` of ``lengths`` equally likely lengths."""
    masses = np.arange(lengths + 1) / lengths
    masses.flags.writeable = False
    return masses


def _inserted(ascending: IntArray, value: int) -> IntArray:
    """A sorted copy with ``value`` added; several times faster than ``np.insert``."""
    index = int(ascending.searchsorted(value))
    longer = np.empty(len(ascending) + 1, dtype=np.int64)
    longer[:index], longer[index], longer[index + 1 :] = ascending[:index], value, ascending[index:]
    return longer


def _replaced(ascending: IntArray, dropped: int, value: int) -> IntArray:
    """A sorted copy with ``value`` in place of one ``dropped``."""
    first, index = int(ascending.searchsorted(dropped)), int(ascending.searchsorted(value))
    replaced = ascending.copy()
    if first < index:
        replaced[first : index - 1], replaced[index - 1] = ascending[first + 1 : index], value
    else:
        replaced[index + 1 : first + 1], replaced[index] = ascending[index:first], value
    return replaced


@dataclass(frozen=True, slots=True)
class FinishedLengths:
    """Counts of the output lengths of finished requests."""

    lengths: IntArray
    """Distinct lengths, sorted."""
    events: IntArray
    """Number of requests of each length."""
    remaining: IntArray
    """Number of requests at least as long as each length."""

    @classmethod
    def of(cls, finished: IntArray) -> "FinishedLengths":
        """Count the sorted lengths ``finished``."""
        # As ``np.unique`` with counts, which would sort again and take three times as long.
        new = np.empty(len(finished), dtype=np.bool_)
        new[:1] = True
        np.not_equal(finished[1:], finished[:-1], out=new[1:])
        (first,) = new.nonzero()
        remaining = len(finished) - first
        events = remaining.copy()
        events[:-1] -= remaining[1:]
        return cls(finished[first], events, remaining)


def kaplan_meier(finished: FinishedLengths, running: IntArray) -> LengthDistribution:
    """Kaplan and Meier's product-limit estimate (1958) of the distribution of lengths.

    running: output tokens of running requests so far, which are lower bounds of their lengths.
    """
    at_risk = finished.remaining + len(running)
    at_risk -= np.sort(running).searchsorted(finished.lengths, side="left")
    masses = np.zeros(len(finished.lengths) + 1)
    np.subtract(1.0, np.cumprod(1.0 - finished.events / at_risk, dtype=np.float64), out=masses[1:])
    return LengthDistribution(finished.lengths, masses)
