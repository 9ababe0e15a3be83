"""Residency policies: which weights come, and which leave for them."""

import math

import pytest
from residency_builders import SECOND, absent, evicted_for, fetched, requests, resident, view_of

from shoal.core import SLO, ConfigError
from shoal.schedule.policies.residency import (
    RESIDENCY_POLICIES,
    CollateResidency,
    FcfsResidency,
    TokenDeadlines,
    TurnsResidency,
)

ALL = pytest.mark.parametrize("policy", [cls() for cls in RESIDENCY_POLICIES.values()], ids=str)


@ALL
def test_nothing_moves_without_requests_for_absent_weights(policy):
    view = view_of(resident("a", requests(3)), resident("b"), absent("c"), free_bytes=5)
    assert policy.decide(view, SECOND) == ((), None)


@ALL
def test_weights_without_requests_leave_first_the_least_recently_used_before_others(policy):
    view = view_of(
        resident("busy", requests(last_step_s=0.0), last_step_s=0.0),
        resident("recent", last_step_s=9.0),
        resident("old", last_step_s=3.0),
        resident("pinned", last_step_s=1.0, pinned=True),
        absent("new", requests(at_s=9.9)),
    )
    leaving = evicted_for(policy.decide(view, 10 * SECOND), "new")
    if isinstance(policy, FcfsResidency):
        assert leaving == ["busy", "old", "recent"], "fcfs looks at last steps alone"
    else:
        assert leaving == ["old", "recent"]


@ALL
def test_weights_that_owe_steps_do_not_leave(policy):
    view = view_of(
        resident("a", evictable=False, evictable_s=2.0),
        resident("b", requests(last_step_s=1.0), evictable=False, evictable_s=2.0),
        absent("c", requests(5)),
    )
    assert evicted_for(policy.decide(view, SECOND), "c") == []


@pytest.mark.parametrize("policy", [FcfsResidency(), CollateResidency()], ids=str)
def test_the_weights_of_the_oldest_request_come_first(policy):
    """Also if that request runs: its weights left while it did."""
    view = view_of(
        absent("waiting", requests(9, at_s=2.0)),
        absent("stream", requests(at_s=1.0, last_step_s=1.5)),
        absent("late", requests(9, at_s=3.0)),
    )
    assert fetched(policy.decide(view, 4 * SECOND)) == ["stream", "waiting", "late"]


def test_collate_serves_all_requests_for_resident_weights_first():
    """However many wait for others, and for however long; rules of the scheduler bound that."""
    view = view_of(
        resident("a", requests(at_s=8.0)), resident("b", last_step_s=9.0), absent("c", requests(99, at_s=0.0))
    )
    assert evicted_for(CollateResidency().decide(view, 10 * SECOND), "c") == ["b"]


# --- turns


def decide(view, at_s=10.0):
    return TurnsResidency().decide(view, round(at_s * SECOND))


def test_turns_serves_the_most_normalised_wait_per_second_first():
    """Five requests of 10 s count 0.5 per second, one of 1 s counts 1."""
    view = view_of(
        absent("long", requests(5), execution_s=10.0), absent("short", requests(1)), free_bytes=1
    )
    assert fetched(decide(view)) == ["short", "long"]


def test_turns_serves_weights_that_come_fast_first():
    view = view_of(absent("slow", requests(2), fetch_s=9.0), absent("fast", requests(1)), free_bytes=1)
    assert fetched(decide(view)) == ["fast", "slow"]


def test_turns_serves_equal_weights_by_age():
    view = view_of(absent("b", requests(at_s=2.0)), absent("a", requests(at_s=3.0)), free_bytes=1)
    assert fetched(decide(view)) == ["b", "a"]


def swapped(here, there, *, at_s=10.0, **others):
    """Whether ``there`` comes in the place of ``here``."""
    return evicted_for(decide(view_of(here, there, **others), at_s), there.name) == [here.name]


def running(count=1, at_s=10.0, **others):
    """Requests that step now."""
    return requests(count, at_s=at_s, last_step_s=at_s, **others)


@pytest.mark.parametrize(("count", "pays"), [(3, False), (4, True)])
def test_turns_swaps_where_that_saves_more_wait_than_it_costs(count, pays):
    """Waiting for the stream takes 4 s, which each request saves; the swap costs the stream 11 s: 10 s for
    the requests, 0.5 s for each fetch. All take 10 s in all, so a request saves 0.4 and the stream loses 1.1.
    """
    stream = resident(
        "a", running(service_time_s=6.0), execution_s=10.0, fetch_s=0.5, since_s=9.9
    )
    waiting = absent("b", requests(count, at_s=9.9), execution_s=10.0, fetch_s=0.5)
    # A turn is shorter than the execution time, which makes the visit of b shorter, too.
    visit_s = math.sqrt(2 * 0.5 * 10) / (1 - math.sqrt(count) / (1 + math.sqrt(count)))
    away_s = 1.0 + min(10.0, visit_s)
    stay_s = min(4.0, 9.9 + math.sqrt(10) / (1 - 1 / (1 + math.sqrt(count))) - 10)
    assert (count * stay_s > away_s) == pays, "the test's own arithmetic"
    assert swapped(stream, waiting) == pays
