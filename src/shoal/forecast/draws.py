"""``core.randomness`` for whole arrays: the same numbers, many at a time."""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Seeds = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
STEP = 0xD1342543DE82EF95
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_GOLDEN, _STEP, _FIRST, _SECOND = map(np.uint64, (GOLDEN, STEP, FIRST, SECOND))


def derive_seeds(seeds: Seeds, counters: npt.NDArray[Any]) -> Seeds:
    """``core.derive_seed`` continued by one counter: ``derive_seed(s, a, b)`` from ``derive_seed(s, a)``.

    The two arrays broadcast against each other; counters are integers >= 0.
    """
    x: Seeds = seeds + (counters.astype(np.uint64) * _STEP + _GOLDEN)
    x ^= x >> np.uint64(30)
    x *= _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    x ^= x >> np.uint64(31)
    return x


@lru_cache(maxsize=64)
def counters(count: int) -> npt.NDArray[np.uint64]:
    """0, 1, ... as a column, for ``derive_seeds`` of every seed with each of them [count, 1]."""
    column = np.arange(count, dtype=np.uint64)[:, None]
    column.flags.writeable = False
    return column


def continue_seed(seed: int, counter: int) -> int:
    """One seed of ``derive_seeds``, which for one alone takes much longer."""
    x = (seed + counter * STEP + GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * FIRST) & _MASK
    x = ((x ^ (x >> 27)) * SECOND) & _MASK
    return x ^ (x >> 31)


def uniforms(seeds: Seeds) -> npt.NDArray[np.float64]:
    """The number in [0, 1) that ``core.uniform`` makes of a derived seed, for each of ``seeds``."""
    return (seeds >> np.uint64(11)).astype(np.float64) * 2.0**-53
