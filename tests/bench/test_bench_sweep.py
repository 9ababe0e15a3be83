"""The search for the highest rate that a server sustains."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from shoal.bench import find_knee


def search(limit, begin, steps):
    tried = []

    async def try_rate(rate):
        tried.append(rate)
        return rate <= limit

    return asyncio.run(find_knee(try_rate, begin, steps)), tried


@given(limit=st.floats(0.01, 1000), begin=st.floats(0.1, 100), steps=st.integers(0, 5))
def test_the_knee_is_next_to_the_limit(limit, begin, steps):
    sweep, tried = search(limit, begin, steps)
    assert sweep.knee is not None
    assert sweep.knee <= limit
    # The interval of a doubling is halved in each step.
    assert limit < sweep.knee * (1 + 2.0**-steps) * (1 + 1e-9)
    assert len(tried) == len(set(tried))


def test_a_server_that_sustains_nothing_has_no_knee():
    sweep, tried = search(0, 1, 3)
    assert sweep.knee is None
    assert len(tried) <= 20


def test_a_server_that_sustains_everything_ends_the_search():
    sweep, tried = search(float("inf"), 1, 3)
    assert sweep.knee == tried[-1]
    assert len(tried) <= 20
