"""Residency policies: which weights come, and which leave for them."""

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
    assert fetched(policy.decide(view, SECOND)) == []


@ALL
def test_weights_without_requests_leave_first_the_least_recently_used_before_others(policy):
    view = view_of(
        resident("busy", requests(last_step_s=0.0), last_step_s=0.0),
        resident("recent", last_step_s=9.0),
        resident("old", last_step_s=3.0),
        resident("pinned", last_step_s=1.0, pinned=True),
        absent("new", requests(at_s=9.9)),
    )
    assert evicted_for(policy.decide(view, 10 * SECOND), "new") == ["old", "recent"]


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


def test_fcfs_serves_older_requests_to_their_ends():
    """Weights leave for a request that is older than all of theirs."""
    here = [
        resident(name, requests(9, at_s=at_s), last_step_s=9.0) for name, at_s in (("a", 1.0), ("b", 3.0))
    ]
    view = view_of(*here, absent("c", requests(at_s=2.0)))
    assert evicted_for(FcfsResidency().decide(view, 10 * SECOND), "c") == ["b"]


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
    view = view_of(absent("long", requests(5), execution_s=10.0), absent("short", requests(1)), free_bytes=1)
    assert fetched(decide(view)) == ["short", "long"]


def test_turns_serves_weights_that_come_fast_first():
    """One request that is served in 1.2 s comes before two that are in 10 s."""
    view = view_of(absent("slow", requests(2), fetch_s=9.0), absent("fast", requests(1)), free_bytes=1)
    assert fetched(decide(view)) == ["fast", "slow"]


def test_turns_serves_equal_weights_by_age():
    """Wait so far counts: also a request of 9 s comes before three of 2 s."""
    view = view_of(absent("b", requests(at_s=2.0)), absent("a", requests(at_s=3.0)), free_bytes=1)
    assert fetched(decide(view)) == ["b", "a"]
    view = view_of(absent("b", requests(at_s=1.0)), absent("a", requests(3, at_s=8.0)), free_bytes=1)
    assert fetched(decide(view)) == ["b", "a"]


def swapped(here, there, *, at_s=10.0):
    """Whether ``there`` comes in the place of ``here``."""
    return evicted_for(decide(view_of(here, there), at_s), there.name) == [here.name]


def running(count=1, *, at_s=10.0, **others):
    """Requests that step now."""
    return requests(count, at_s=at_s, last_step_s=at_s, **others)


@pytest.mark.parametrize(("count", "pays"), [(5, False), (6, True)])
def test_turns_swaps_where_that_saves_more_wait_than_it_costs(count, pays):
    """The stream ends in 1 s, which each request saves. The swap costs the stream 5 s: two fetches, and 1 s
    in which the requests are served."""
    stream = resident("a", running(), fetch_s=2.0, since_s=9.5)
    assert swapped(stream, absent("b", requests(count, at_s=9.9), fetch_s=2.0)) == pays


def test_turns_adds_up_the_cost_of_all_that_have_to_leave():
    """As above, but the weights that come need the room of two, each with a stream."""
    here = [resident(name, running(), fetch_s=2.0, since_s=9.5) for name in "ab"]
    for count, leaving in ((10, []), (11, ["a", "b"])):
        new = absent("c", requests(count, at_s=9.9), fetch_s=2.0, num_bytes=2)
        assert evicted_for(decide(view_of(*here, new)), "c") == leaving


def test_turns_adds_the_wait_of_all_others_while_the_device_idles():
    """As above, with three requests for other weights. They lose 12 s in two fetches, unless others step."""
    stream = resident("a", running(), fetch_s=2.0, since_s=9.5)
    others = absent("other", requests(3, at_s=9.9), fetch_s=2.0)
    stepping = resident("other", requests(3, at_s=9.9), evictable=False, evictable_s=11.0, fetch_s=2.0)
    for third, count, leaving in ((others, 17, []), (others, 18, ["a"]), (stepping, 6, ["a"])):
        view = view_of(stream, absent("b", requests(count, at_s=9.9), fetch_s=2.0), third)
        assert evicted_for(decide(view), "b") == leaving


def test_turns_lets_the_weights_with_the_least_work_leave():
    here = [resident(name, running(count), since_s=9.9) for name, count in (("a", 3), ("b", 1), ("c", 2))]
    assert evicted_for(decide(view_of(*here, absent("d", requests(99, at_s=9.9)))), "d") == ["b"]


def test_turns_takes_room_without_work_before_room_with():
    """Even for many requests: two fetches cost less than one and the wait of a stream."""
    view = view_of(resident("a", running(), since_s=9.9), resident("b"), absent("c", requests(99, at_s=9.9)))
    assert evicted_for(decide(view), "c") == ["b"]


@pytest.mark.parametrize("execution_s", [2.0, 8.0])
@pytest.mark.parametrize("fetch_s", [0.1, 0.4])
def test_turns_end_after_a_time_that_grows_with_the_root_of_fetch_and_execution_time(execution_s, fetch_s):
    """With as many requests on both sides, half of the time is for each: sqrt(2 F L) / (1 - 1/2)."""
    turn_s = 2 * (2 * fetch_s * execution_s) ** 0.5
    here = resident("a", running(5, at_s=100.0), execution_s=execution_s, fetch_s=fetch_s, since_s=100.0)
    there = absent("b", requests(5, at_s=100.0), execution_s=execution_s, fetch_s=fetch_s)
    early = decide(view_of(here, there), 100.0 + 0.99 * turn_s)
    assert evicted_for(early, "b") == []
    assert early.until_ns == pytest.approx((100.0 + turn_s) * SECOND)
    assert swapped(here, there, at_s=100.0 + 1.01 * turn_s)


def test_a_turn_is_longer_for_weights_with_more_requests():
    """Nine streams against one have three quarters of the time, as roots of numbers say."""
    here = resident("a", running(9), execution_s=50.0, fetch_s=1.0, since_s=10.0)
    there = absent("b", requests(1, at_s=0.0), execution_s=50.0, fetch_s=1.0)
    assert decide(view_of(here, there)).until_ns == pytest.approx((10.0 + 4 * 10.0) * SECOND)


def test_a_turn_is_not_over_before_others_have_been_away_for_long_enough():
    """Weights that are resident for an hour do not leave for a request that has just come."""
    here = resident("a", running(at_s=3600.0), execution_s=2.0, fetch_s=0.25)
    there = absent("b", requests(at_s=3600.0), execution_s=2.0, fetch_s=0.25)
    assert not swapped(here, there, at_s=3601.9)
    assert swapped(here, there, at_s=3602.1), "sqrt(2 F L) / (1/2)"


def test_turns_leave_weights_alone_that_fit_together_with_all_others():
    """Pinned weights have no turns, and take no room of the others."""
    view = view_of(
        resident("a", running(), pinned=True, num_bytes=9),
        resident("b", running(), since_s=0.0, execution_s=0.1, fetch_s=0.1),
        absent("c", requests(5, at_s=0.0), execution_s=100.0, num_bytes=1),
        free_bytes=1,
    )
    assert evicted_for(decide(view), "c") == []


def test_six_requests_for_three_weights_need_two_fetches():
    """Budget of one: both requests for a, which is there, then both for b, then both for c."""
    queue = {name: [requests(at_s=0.1 * place)[0] for place in places] for name, places in ABC.items()}
    there, log = "a", []
    now_s = 1.0
    while any(queue.values()):
        if queue[there]:
            queue[there].pop()
            log.append(there)
            now_s += 1.0
            continue
        view = view_of(
            *[
                resident(name, queue[name]) if name == there else absent(name, queue[name], fetch_s=2.0)
                for name in queue
            ]
        )
        swap = decide(view, now_s).swaps[0]
        assert swap.evict == [there]
        there = swap.fetch
        log.append(f"fetch {there}")
        now_s += 2.0
    assert log == ["a", "a", "fetch b", "b", "b", "fetch c", "c", "c"]


ABC = {"a": (0, 3), "b": (1, 4), "c": (2, 5)}


def test_turns_keeps_weights_while_equal_requests_for_others_wait():
    """ABCABC before a has served anything: two requests of b do not pay for two fetches."""
    here = resident("a", requests(2, at_s=10.0), since_s=10.0, fetch_s=2.0)
    assert not swapped(here, absent("b", requests(2, at_s=10.0), fetch_s=2.0))


# --- token-deadlines


def due(here, there, at_s=10.0):
    decision = TokenDeadlines().decide(view_of(here, there), round(at_s * SECOND))
    return evicted_for(decision, there.name) == [here.name]


def test_weights_whose_next_token_is_due_first_come_first():
    """Without goals a first token is due after 10 s, each further one after 0.1 s."""
    view = view_of(
        absent("ahead", requests(at_s=0.0, generated=60, last_step_s=1.0)),  # 16 s
        absent("goal", requests(at_s=8.0, slo=SLO(ttft_s=1.0))),  # 9 s
        absent("prompt", requests(at_s=4.0), requests(at_s=8.0)),  # 14 s
        absent("stream", requests(at_s=0.0, generated=20, last_step_s=1.0, slo=SLO(tpot_s=0.05))),  # 11 s
    )
    assert fetched(TokenDeadlines().decide(view, 10 * SECOND)) == ["goal", "stream", "prompt", "ahead"]


def test_goals_of_requests_without_any_are_options():
    prompts = absent("prompts", requests(at_s=0.0))
    stream = absent("stream", requests(at_s=0.0, generated=30))
    view = view_of(prompts, stream)
    assert fetched(TokenDeadlines(ttft_s=5.0).decide(view, 0)) == ["prompts", "stream"]
    late = view_of(absent("prompts", requests(at_s=2.0)), stream)
    assert fetched(TokenDeadlines(ttft_s=1.0, tpot_s=0.05).decide(late, 0)) == ["stream", "prompts"]
    with pytest.raises(ConfigError, match="tpot must be above 0"):
        TokenDeadlines(tpot_s=0.0)


def test_streams_ahead_of_their_deadlines_leave_those_with_the_most_slack_first():
    """Nine tokens more are 0.9 s; b is due before the prompt, so it stays."""
    here = [
        resident(name, running(at_s=0.0, generated=generated))
        for name, generated in (("a", 100), ("b", 50), ("c", 109))
    ]
    decision = TokenDeadlines().decide(view_of(*here, absent("d", requests(at_s=6.0))), 10 * SECOND)
    assert evicted_for(decision, "d") == ["c", "a"]


def test_prompts_for_one_model_are_served_together():
    """Also those that came later than prompts for others, once the first of them was due."""
    here = resident("a", requests(at_s=1.0), requests(at_s=3.0))
    assert not due(here, absent("b", requests(at_s=2.0)))
    assert due(resident("a", requests(at_s=3.0)), absent("b", requests(at_s=2.0)))


@pytest.mark.parametrize("utilisation", [0.1, 0.3])
def test_a_quantum_makes_slack_for_a_round(utilisation):
    """q = u m R with m R = sum(fetch) / (1 - sum(u)), where u of each is the time of a step over 0.1 s."""
    streams = {"generated": 300, "service_time_s": 300 * 0.1 * utilisation}
    here = resident("a", running(at_s=1.0, **streams), since_s=10.0, fetch_s=0.5)
    there = absent("b", requests(at_s=0.0, last_step_s=9.0, **streams), fetch_s=0.5)
    quantum_s = utilisation * 1.0 / (1 - 2 * utilisation)
    decision = TokenDeadlines().decide(view_of(here, there), 10 * SECOND)
    assert evicted_for(decision, "b") == []
    assert decision.until_ns == pytest.approx((10.0 + quantum_s) * SECOND)
    assert due(here, there, 10.01 + quantum_s)


def test_a_quantum_is_bounded_where_no_slack_lasts_a_round():
    streams = {"generated": 10, "service_time_s": 1.0}
    here = resident("a", running(at_s=1.0, **streams), since_s=10.0)
    there = absent("b", requests(at_s=0.0, last_step_s=9.0, **streams))
    assert not due(here, there, 13.9)
    assert due(here, there, 14.1)
