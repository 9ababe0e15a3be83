"""The histogram of inter-token latencies, against a list of all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.measure import InterTokenLatencies

LATENCIES = st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 5)), min_size=1, max_size=60)


@given(LATENCIES, st.sampled_from([0, 50, 90, 99, 100]))
def test_mean_and_percentiles_are_those_of_the_list(pairs, percent):
    latencies = InterTokenLatencies()
    for latency, count in pairs:
        latencies.add(np.array([latency]), count)
    every = sorted(latency for latency, count in pairs for _ in range(count) if latency)
    assert len(latencies) == len(every)
    if every:
        assert latencies.mean_s == pytest.approx(sum(every) / len(every) / 1e9)
        exact = np.percentile(every, percent, method="lower") / 1e9
        assert latencies.percentile_s(percent) == pytest.approx(exact, rel=0.006)


@given(st.lists(LATENCIES, min_size=1, max_size=4))
def test_merged_histograms_equal_one(lists):
    parts, whole = [], InterTokenLatencies()
    for pairs in lists:
        parts.append(InterTokenLatencies())
        values, count = (np.array(side) for side in zip(*pairs, strict=True))
        parts[-1].add(values, count)
        whole.add(values, count)
    assert InterTokenLatencies.merge(parts) == whole
    assert (whole == InterTokenLatencies()) == (len(whole) == 0)


def test_memory_does_not_grow_with_the_number_of_tokens():
    latencies = InterTokenLatencies()
    for _ in range(100):
        latencies.add(np.full(10_000, 5_000_000), 1)
    assert len(latencies) == 1_000_000
    assert latencies._buffered == 0
