"""What residency policies have in common, over random views."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from residency_builders import SECOND, absent, requests, resident

from shoal.core import NO_GOALS, SLO
from shoal.schedule.policies.residency import (
    RESIDENCY_POLICIES,
    CollateResidency,
    FcfsResidency,
    Place,
    ResidencyView,
    TokenDeadlines,
    TurnsResidency,
)

NOW_S = 100.0
NOW_NS = round(NOW_S * SECOND)
POLICIES = st.sampled_from([cls() for cls in RESIDENCY_POLICIES.values()])

times = st.floats(0.0, NOW_S)
goals = st.sampled_from([NO_GOALS, SLO(ttft_s=1.0), SLO(tpot_s=0.02), SLO(ttft_s=30.0, tpot_s=1.0)])


@st.composite
def queues(draw):
    """Requests of one age."""
    at_s = draw(times)
    stepped = draw(st.booleans())
    return requests(
        draw(st.integers(1, 40)),
        at_s=at_s,
        last_step_s=draw(st.floats(at_s, NOW_S)) if stepped else None,
        generated=draw(st.integers(0, 500)) if stepped else 0,
        service_time_s=draw(st.floats(0.0, NOW_S)) if stepped else 0.0,
        slo=draw(goals),
    )


@st.composite
def some_weights(draw, name):
    parts = draw(st.lists(queues(), max_size=2))
    fields = {
        "num_bytes": draw(st.sampled_from([1, 1, 2, 5])),
        "fetch_s": draw(st.sampled_from([0.0, 0.02, 0.2, 2.0, 30.0])),
        "execution_s": draw(st.sampled_from([0.0, 0.05, 1.0, 20.0])),
        "since_s": draw(times),
    }
    if draw(st.booleans()):
        return absent(name, *parts, **fields)
    weights = resident(
        name,
        *parts,
        **fields,
        last_step_s=draw(times),
        pinned=draw(st.integers(0, 4)) == 0,
        evictable=(evictable := draw(st.booleans())),
        evictable_s=NOW_S if evictable else NOW_S + draw(st.floats(0.0, 2.0)),
    )
    if weights.evictable_ns is not None and draw(st.integers(0, 6)) == 0:
        return replace(weights, place=Place.COMING, evictable=False, evictable_ns=None)
    return weights


@st.composite
def views(draw):
    names = draw(st.permutations("abcdefgh"))[: draw(st.integers(1, 8))]
    weights = {name: draw(some_weights(name)) for name in names}
    return ResidencyView(weights, draw(st.integers(0, 4)))


@given(POLICIES, views())
def test_only_absent_weights_with_requests_come_and_only_evictable_ones_leave(policy, view):
    decision = policy.decide(view, NOW_NS)
    wanted = {each.name for each in view.weights.values() if each.place is Place.ABSENT and each.num_requests}
    assert sorted(swap.fetch for swap in decision.swaps) == sorted(wanted), "each of them, once"
    for swap in decision.swaps:
        assert len(set(swap.evict)) == len(swap.evict)
        assert all(view.weights[name].evictable for name in swap.evict)


@given(POLICIES, views())
def test_a_policy_looks_ahead(policy, view):
    until_ns = policy.decide(view, NOW_NS).until_ns
    assert until_ns is None or until_ns > NOW_NS


@given(POLICIES, views(), st.randoms(use_true_random=False))
def test_decisions_depend_on_nothing_but_the_values(policy, view, random):
    names = list(view.weights)
    random.shuffle(names)
    shuffled = view._replace(weights={name: view.weights[name] for name in names})
    first = policy.decide(view, NOW_NS)
    assert policy.decide(view, NOW_NS) == first
    assert policy.decide(shuffled, NOW_NS) == first


@given(POLICIES, views())
def test_weights_with_requests_leave_after_those_without(policy, view):
    assume(not isinstance(policy, FcfsResidency))
    for swap in policy.decide(view, NOW_NS).swaps:
        with_requests = [view.weights[name].num_requests > 0 for name in swap.evict]
        assert with_requests == sorted(with_requests)
        if any(with_requests):
            idle = {each.name for each in view.weights.values() if each.evictable and not each.num_requests}
            assert idle <= set(swap.evict)
            assert not isinstance(policy, CollateResidency)


@given(views())
def test_token_deadlines_evicts_nothing_that_is_due_sooner(view):
    def due_ns(name):
        table = view.weights[name].requests()
        rows = zip(table.requests, table.num_generated, strict=True)
        return min(
            request.arrival_ns + SECOND * ((request.slo.ttft_s or 10.0) + count * (request.slo.tpot_s or 0.1))
            for request, count in rows
        )

    decision = TokenDeadlines().decide(view, NOW_NS)
    dues = [due_ns(swap.fetch) for swap in decision.swaps]
    assert dues == pytest.approx(sorted(dues), abs=1)
    for swap in decision.swaps:
        others = [due_ns(name) for name in swap.evict if view.weights[name].num_requests]
        assert others == pytest.approx(sorted(others, reverse=True), abs=1)
        assert all(other > due_ns(swap.fetch) - 1 for other in others)


@given(st.data(), st.integers(1, 6), st.sampled_from([0.05, 0.5, 5.0]))
def test_turns_evicts_nothing_of_more_value_before_its_turn_is_over(data, residents, fetch_s):
    """Among weights that are alike, value is the number of requests."""
    numbers = st.integers(1, 50)
    here = [
        resident(
            f"{place}",
            requests(data.draw(numbers), at_s=NOW_S, last_step_s=NOW_S),
            since_s=NOW_S,
            fetch_s=fetch_s,
            evictable=data.draw(st.booleans()),
        )
        for place in range(residents)
    ]
    new = absent("new", requests(data.draw(numbers), at_s=NOW_S), fetch_s=fetch_s)
    view = ResidencyView({each.name: each for each in (*here, new)}, 0)
    (swap,) = TurnsResidency().decide(view, NOW_NS).swaps
    leaving = [view.weights[name] for name in swap.evict]
    staying = [each for each in here if each.evictable and each not in leaving]
    for each in leaving:
        assert each.num_requests < new.num_requests
        assert all(each.num_requests <= other.num_requests for other in staying)
