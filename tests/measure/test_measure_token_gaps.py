"""Times between tokens in bins, against all of them in a list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.measure import TokenGaps

GAPS = st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 5)), min_size=1, max_size=60)


@given(GAPS, st.sampled_from([0, 50, 90, 99, 100]))
def test_mean_and_percentiles_are_those_of_the_list(pairs, percent):
    gaps = TokenGaps()
    for gap, times in pairs:
        gaps.add(np.array([gap]), times)
    every = sorted(gap for gap, times in pairs for _ in range(times) if gap)
    assert len(gaps) == len(every)
    if every:
        assert gaps.mean_s == pytest.approx(sum(every) / len(every) / 1e9)
        exact = np.percentile(every, percent, method="lower") / 1e9
        assert gaps.percentile_s(percent) == pytest.approx(exact, rel=0.006)


@given(st.lists(GAPS, min_size=1, max_size=4))
def test_several_together_are_the_same_as_one(lists):
    parts, whole = [], TokenGaps()
    for pairs in lists:
        parts.append(TokenGaps())
        values, times = (np.array(side) for side in zip(*pairs, strict=True))
        parts[-1].add(values, times)
        whole.add(values, times)
    assert TokenGaps.together(parts) == whole
    assert (whole == TokenGaps()) == (len(whole) == 0)


def test_memory_does_not_grow_with_the_number_of_gaps():
    gaps = TokenGaps()
    for _ in range(100):
        gaps.add(np.full(10_000, 5_000_000), 1)
    assert len(gaps) == 1_000_000
    assert gaps._buffered == 0
