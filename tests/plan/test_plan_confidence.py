"""Intervals of means."""

import math

import numpy as np
import pytest

from shoal.plan.confidence import mean_interval


def interval(values, seed=0):
    return mean_interval(np.asarray(values, dtype=float), np.random.default_rng(seed))


def test_what_never_differs_is_certain():
    found = interval([0.25] * 500)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))


def test_nan_does_not_count():
    found = interval([1.0, math.nan, 0.0, math.nan] * 100)
    assert found.mean == 0.5
    assert 0 <= found.low <= 0.5 <= found.high <= 1


@pytest.mark.parametrize("values", [[], [math.nan] * 10])
def test_nothing_gives_nan(values):
    found = interval(values)
    assert all(map(math.isnan, (found.mean, found.low, found.high)))


def test_independent_requests_have_the_interval_of_the_normal_distribution():
    values = np.random.default_rng(1).random(4000) < 0.9
    found = interval(values)
    half = 1.96 * math.sqrt(0.9 * 0.1 / 4000)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.35)


def test_requests_that_fail_together_make_it_wider():
    """A burst that is missed whole is one event, not a hundred."""
    bursts = np.repeat(np.random.default_rng(2).random(40) < 0.9, 100)
    apart = np.random.default_rng(2).permutation(bursts)
    together, shuffled = interval(bursts), interval(apart)
    assert together.mean == shuffled.mean
    assert together.high - together.low > 3 * (shuffled.high - shuffled.low)


def test_intervals_hold_the_true_mean_about_as_often_as_they_say():
    random = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        found = interval(random.random(400) < 0.8)
        held += found.low <= 0.8 <= found.high
    assert held >= 85
