"""The past: output lengths of finished requests, and what they say about unfinished ones.

Past-Future scheduler (Gong et al., section 3.2): a request that has generated d tokens is predicted from
the recent lengths greater than d.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from shoal.core import ConfigError
from shoal.forecast.draws import Seeds, continue_seed, counters, derive_seeds, uniforms

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_FEW = 4
"""For more lengths than this at once, sorting anew costs less than putting in one after another."""

_MANY = 1024
"""For fewer targets than this one search costs less than the operations that would spare it."""

COLD_STARTS = ("kaplan-meier", "max")
_ENDLESS: IntArray = np.array([np.iinfo(np.int64).max])


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of output lengths; mass that ``masses`` leave over lies at a request's maximum.

    lengths: ascending, may repeat. masses: P(length <= what), for no length, and then up to and including
    each. equal_masses: they are i / n.
    """

    lengths: IntArray
    masses: FloatArray
    equal_masses: bool = False

    @property
    def cumulative(self) -> FloatArray:
        """P(length <= lengths[i]) up to and including entry i."""
        return self.masses[1:]

    @cached_property
    def _outcomes(self) -> IntArray:
        """The lengths, and one behind them for the mass that lies at a request's maximum."""
        return np.concatenate((self.lengths, _ENDLESS))

    @cached_property
    def _weighted(self) -> FloatArray:
        """Sums of length times mass: of no length, and then up to each."""
        mass = self.cumulative - self.masses[:-1]
        return np.concatenate((np.zeros(1), np.cumsum(mass * self.lengths)))

    def _mass_until(self, tokens: IntArray) -> FloatArray:
        """P(length <= tokens)."""
        return self.masses.take(self.lengths.searchsorted(tokens, side="right"))

    def _places(self, targets: FloatArray) -> IntArray:
        """``cumulative.searchsorted(targets, side="right")``; faster for many where masses are equal."""
        size = len(self.lengths)
        if not self.equal_masses or targets.size < _MANY:
            return self.cumulative.searchsorted(targets, side="right")
        places: IntArray = (targets * size).astype(np.int64)
        np.minimum(places, size - 1, out=places)
        # Rounding may have put a target on the wrong side of a step.
        places -= self.masses.take(places) > targets
        places += self.masses.take(places + 1) <= targets
        return places

    def draw(self, seeds: Seeds, generated: IntArray, ceilings: IntArray, samples: int) -> IntArray:
        """Predicted output lengths [samples, n] of requests that have generated ``generated`` tokens.

        Each is drawn from the lengths greater than that, capped by the request's ceiling, and is the
        ceiling where no length is greater. A draw depends on (seed, generated, sample) only.
        """
        keys = derive_seeds(derive_seeds(seeds, generated), counters(samples))
        past = self._mass_until(generated)
        targets = uniforms(keys)
        targets *= 1.0 - past
        targets += past
        picked = self._outcomes.take(self._places(targets))
        return np.minimum(picked, ceilings, out=picked)

    def draw_one(self, seed: int, generated: int, ceiling: int, samples: int) -> list[int]:
        """``draw`` for one request alone [samples]: the same numbers, without arrays of one."""
        key = continue_seed(seed, generated)
        past = float(self.masses[self.lengths.searchsorted(generated, side="right")])
        left = 1.0 - past
        targets = [(continue_seed(key, sample) >> 11) * 2.0**-53 * left + past for sample in range(samples)]
        picked = self._outcomes.take(self.cumulative.searchsorted(targets, side="right")).tolist()
        return [min(length, ceiling) for length in picked]

    def mean_beyond(self, generated: IntArray, ceilings: IntArray) -> FloatArray:
        """Expected output length [n] of requests that have generated ``generated`` tokens, each capped."""
        weighted = self._weighted
        low = self.lengths.searchsorted(generated, side="right")
        high = self.lengths.searchsorted(ceilings, side="right")
        left = 1.0 - self._mass_until(generated)
        beyond = 1.0 - self._mass_until(ceilings)
        mean = ceilings.astype(np.float64)
        total = weighted[np.maximum(high, low)] - weighted[low] + beyond * ceilings
        return np.divide(total, left, out=mean, where=left > 0)


class LengthHistory:
    """Output lengths of one service's last ``window`` finished requests; its only writer is ``record``.

    maximum: longest output that the service allows.
    cold_start: what is believed until the window is full for the first time. "max": it starts full of
        ``maximum`` (as the paper), each finished request replacing one. "kaplan-meier": finished requests
        are events and running ones censored observations of Kaplan and Meier's estimator (1958), so that the
        short ones, which finish first, do not pass for all there are; what mass it leaves over lies at
        the maximum. A full window is used as it is: in steady state it is an unbiased sample already.
    """

    def __init__(self, maximum: int, window: int = 1000, cold_start: str = "kaplan-meier") -> None:
        if window < 1:
            raise ConfigError(f"a length history's window must be at least 1 request, got {window}")
        if cold_start not in COLD_STARTS:
            raise ConfigError(
                f"cold_start {cold_start!r} is not known; possible are {', '.join(COLD_STARTS)}"
            )
        self.maximum = maximum
        self.window = window
        filled = cold_start == "max"
        self._recent: deque[int] = deque([maximum] * window if filled else (), maxlen=window)
        self._sorted: IntArray = np.array(self._recent, dtype=np.int64)
        # (length forgotten, if any, new length) of those not yet in ``_sorted``: mostly nobody asks. Of more
        # than ``_FEW`` not all are here.
        self._pending: list[tuple[int | None, int]] = []
        self._ends: Ends | None = None
        self._full: LengthDistribution | None = None
        self._mean: float | None = None

    @property
    def censors(self) -> bool:
        """Whether running requests count as observations now."""
        return len(self._recent) < self.window

    @property
    def mean(self) -> float | None:
        """Mean of the lengths remembered; None before the first."""
        if self._mean is None and self._recent:
            self._mean = float(self._ascending().mean())
        return self._mean

    def record(self, length: int) -> None:
        """One more request finished with ``length`` output tokens (never a cancelled or failed one)."""
        if length < 1:
            raise ValueError(f"a finished request has at least 1 output token, got {length}")
        gone = self._recent[0] if len(self._recent) == self.window else None
        self._recent.append(length)
        if len(self._pending) <= _FEW:
            self._pending.append((gone, length))
        self._ends, self._full, self._mean = None, None, None

    def _ascending(self) -> IntArray:
        """The lengths remembered, in order."""
        if len(self._pending) > _FEW:
            self._sorted = np.sort(np.array(self._recent, dtype=np.int64))
        else:
            for gone, length in self._pending:
                lengths = self._sorted
                self._sorted = _inserted(lengths, length) if gone is None else _swapped(lengths, gone, length)
        self._pending.clear()
        return self._sorted

    def distribution(self, generated: IntArray) -> LengthDistribution:
        """What is believed now, where running requests have generated ``generated`` tokens."""
        if self.censors:
            if self._ends is None:
                self._ends = Ends.of(self._ascending())
            return kaplan_meier(self._ends, generated)
        if self._full is None:
            self._full = LengthDistribution(self._ascending(), _equal_masses(self.window), equal_masses=True)
        return self._full


@lru_cache(maxsize=16)
def _equal_masses(lengths: int) -> FloatArray:
    """``LengthDistribution.masses`` of so many lengths."""
    masses = np.arange(lengths + 1) / lengths
    masses.flags.writeable = False
    return masses


def _inserted(ascending: IntArray, value: int) -> IntArray:
    """``np.insert`` in its place, several times as fast."""
    at = int(ascending.searchsorted(value))
    longer = np.empty(len(ascending) + 1, dtype=np.int64)
    longer[:at], longer[at], longer[at + 1 :] = ascending[:at], value, ascending[at:]
    return longer


def _swapped(ascending: IntArray, gone: int, value: int) -> IntArray:
    """The same with one ``gone`` taken out."""
    first, at = int(ascending.searchsorted(gone)), int(ascending.searchsorted(value))
    other = ascending.copy()
    if first < at:
        other[first : at - 1], other[at - 1] = ascending[first + 1 : at], value
    else:
        other[at + 1 : first + 1], other[at] = ascending[at:first], value
    return other


@dataclass(frozen=True, slots=True)
class Ends:
    """Lengths seen in full: each that occurs, ascending; how often; and how many are at least as long."""

    lengths: IntArray
    events: IntArray
    remaining: IntArray

    @classmethod
    def of(cls, finished: IntArray) -> "Ends":
        """Counted from the ``finished`` lengths, ascending."""
        # As ``np.unique`` with counts, which would sort once more and takes three times as long.
        new = np.empty(len(finished), dtype=np.bool_)
        new[:1] = True
        np.not_equal(finished[1:], finished[:-1], out=new[1:])
        (first,) = new.nonzero()
        remaining = len(finished) - first
        events = remaining.copy()
        events[:-1] -= remaining[1:]
        return cls(finished[first], events, remaining)


def kaplan_meier(ends: Ends, running: IntArray) -> LengthDistribution:
    """Kaplan and Meier's product-limit estimate (1958) of the distribution of lengths.

    ends: lengths seen in full. running: lengths of which only "more than this" is known.
    """
    at_risk = ends.remaining + len(running)
    at_risk -= np.sort(running).searchsorted(ends.lengths, side="left")
    masses = np.zeros(len(ends.lengths) + 1)
    np.subtract(1.0, np.cumprod(1.0 - ends.events / at_risk, dtype=np.float64), out=masses[1:])
    return LengthDistribution(ends.lengths, masses)
