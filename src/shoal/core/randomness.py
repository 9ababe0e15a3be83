"""Counter-based random numbers: seeds and uniform draws keyed by (seed, counters).

A draw does not depend on the number or order of earlier draws. The mixing function is splitmix64's
finaliser (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), applied once per counter.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_seed(seed: int, *counters: int) -> int:
    """A 64-bit seed that depends on ``seed`` and on every counter, in order."""
    state = _mix((seed + _GOLDEN) & _MASK)
    for counter in counters:
        state = _mix((state + _GOLDEN + (counter & _MASK) * 0xD1342543DE82EF95) & _MASK)
    return state


def uniform(seed: int, *counters: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (derive_seed(seed, *counters) >> 11) * 2.0**-53
