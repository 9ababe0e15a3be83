"""Token buckets against a simple model."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serve.http.api_key_limits import TokenBucket

STEPS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), max_size=30)


@given(st.integers(1, 60), STEPS)
def test_a_bucket_fills_evenly_and_holds_a_minute(per_minute, steps):
    bucket = TokenBucket(per_minute)
    now_s, level = 0, Fraction(per_minute)
    for later_s, amount in steps:
        now_s += later_s
        level = min(Fraction(per_minute), level + Fraction(later_s * per_minute, 60))
        wait_s = max(Fraction(0), (1 - level) * 60 / per_minute)
        assert bucket.wait_s(now_s) == pytest.approx(float(wait_s), abs=1e-6)
        if wait_s == 0:
            bucket.take(amount, now_s)
            level -= amount


@given(st.integers(1, 30), st.lists(st.integers(0, 20), max_size=100))
def test_no_minute_has_more_than_twice_the_rate(per_minute, pauses_s):
    bucket, taken_s, now_s = TokenBucket(per_minute), [], 100
    for pause_s in pauses_s:
        now_s += pause_s
        if not bucket.wait_s(now_s):
            bucket.take(1, now_s)
            taken_s.append(now_s)
    for start_s in taken_s:
        in_minute = sum(start_s <= at_s < start_s + 60 for at_s in taken_s)
        assert in_minute <= 2 * per_minute


def test_after_the_wait_one_can_be_taken():
    bucket = TokenBucket(6)
    bucket.take(10, 50.0)
    assert bucket.wait_s(50.0) == pytest.approx(50)
    assert bucket.wait_s(50.0 + 49) == pytest.approx(1)
    assert bucket.wait_s(50.0 + 50.001) == 0
