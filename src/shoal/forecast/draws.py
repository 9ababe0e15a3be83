"""Vectorised ``core.randomness``: the same random numbers, for arrays of seeds."""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Seeds = npt.NDArray[np.uint64]

# The constants of ``core.randomness``.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEP = np.uint64(0xD1342543DE82EF95)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


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
    """0, 1, ... as a column [count, 1], for ``derive_seeds``."""
    column = np.arange(count, dtype=np.uint64)[:, None]
    column.flags.writeable = False
    return column


def uniforms(seeds: Seeds) -> npt.NDArray[np.float64]:
    """``core.uniform``: a number in [0, 1) for each derived seed."""
    return (seeds >> np.uint64(11)).astype(np.float64) * 2.0**-53
