"""Counters over the last seconds, beside sums over all samples; quantiles beside sorted values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serve.page.window import RestartingCounters, Window, quantile

KEY = ("tokens", "a")


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=4))
def test_counters_go_on_after_restarts(lives):
    """lives: what each life of a process adds, step by step."""
    counters, total = RestartingCounters(), 0
    counters.add("0", {KEY: 0})
    for steps in lives:
        count = 0
        for added in steps:
            count += added
            counters.add("0", {KEY: count})
        # A life whose first count is not below the last of the one before would go unseen.
        total += count
        counters.add("0", {KEY: 0})
    assert counters.totals() == {KEY: (total,)}


def test_processes_are_added_up():
    counters = RestartingCounters()
    counters.add("0", {KEY: 0})
    counters.add("1", {KEY: 0, ("steps", "1"): 0})
    counters.add("0", {KEY: 5})
    counters.add("1", {KEY: 7, ("steps", "1"): 2})
    assert counters.totals() == {KEY: (12,), ("steps", "1"): (2,)}


def test_what_a_process_counted_before_it_was_seen_is_no_increase():
    counters, window = RestartingCounters(), Window(60)
    for time, counts in enumerate(({"0": 500}, {"0": 510, "1": 8000}, {"0": 510, "1": 8003})):
        for source, count in counts.items():
            counters.add(source, {KEY: count})
        window.add(float(time), counters.totals())
    assert window.increase(KEY) == (13,)


@given(
    st.lists(st.tuples(st.floats(0.1, 3), st.integers(0, 9)), min_size=1, max_size=40),
    st.floats(0.1, 12),
)
def test_a_window_counts_what_came_in_the_last_seconds(samples, last_s):
    """Every sample is kept for at least the window's length, so that nothing of it is missed."""
    window, now, total, history = Window(10), 0.0, 0, []
    for gap, added in samples:
        now, total = now + gap, total + added
        history.append((now, total))
        window.add(now, {KEY: (float(total),)})
    wanted = min(last_s, 10)
    older = [count for time, count in history if time <= now - wanted]
    before = older[-1] if older else history[0][1]
    assert window.increase(KEY, wanted) == (total - before,)
    begin = (
        next(time for time, count in reversed(history) if time <= now - wanted) if older else history[0][0]
    )
    expected = (total - before) / (now - begin) if now > begin else 0.0
    assert window.rate(KEY, wanted) == pytest.approx(expected)


def test_unknown_counters_have_not_grown():
    window = Window(10)
    assert (window.increase(KEY), window.rate(KEY, 5)) == ((), 0.0)
    window.add(1.0, {})
    assert (window.increase(KEY), window.rate(KEY, 5)) == ((), 0.0)
    window.add(2.0, {KEY: (40.0,)})
    assert window.increase(KEY) == (0.0,)  # it was there before the first sample
    window.add(3.0, {KEY: (44.0,)})
    assert window.increase(KEY) == (4.0,)


BOUNDS = (0.1, 0.5, 1.0, 5.0, math.inf)


@given(st.lists(st.floats(0, 20), max_size=60), st.sampled_from((0.0, 0.5, 0.95, 0.99, 1.0)))
def test_a_quantile_is_in_the_bucket_of_the_value_with_that_rank(values, share):
    cumulative = [sum(value <= bound for value in values) for bound in BOUNDS]
    found = quantile(BOUNDS, cumulative, share)
    if not values:
        assert found is None
        return
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    bucket = next(number for number, bound in enumerate(BOUNDS) if exact <= bound)
    low = BOUNDS[bucket - 1] if bucket else 0.0
    assert found is not None
    assert low <= found <= (BOUNDS[bucket] if bucket < len(BOUNDS) - 1 else low)


def test_a_histogram_without_samples_has_no_quantile():
    assert quantile(BOUNDS, (), 0.5) is None
