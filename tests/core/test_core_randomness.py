"""Counter-based randomness: a function of its counters, and uniform."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shoal.core import derive_seed, uniform

integers = st.integers(-(2**63), 2**63 - 1)


@given(integers, st.lists(integers, max_size=4))
def test_the_same_counters_give_the_same_number_in_the_unit_interval(seed: int, counters: list[int]) -> None:
    assert uniform(seed, *counters) == uniform(seed, *counters)
    assert 0.0 <= uniform(seed, *counters) < 1.0
    assert 0 <= derive_seed(seed, *counters) < 2**64


def test_neighbouring_seeds_and_counters_are_uniform_and_uncorrelated() -> None:
    draws = np.array([[uniform(seed, position) for position in range(100)] for seed in range(100)])
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3
    for axis in (0, 1):
        neighbours = np.corrcoef(draws.take(range(99), axis).ravel(), draws.take(range(1, 100), axis).ravel())
        assert abs(neighbours[0, 1]) < 0.04


def test_the_order_and_number_of_counters_matter() -> None:
    seeds = {
        derive_seed(1),
        derive_seed(1, 0),
        derive_seed(1, 0, 0),
        derive_seed(1, 2, 3),
        derive_seed(1, 3, 2),
    }
    assert len(seeds) == 5
