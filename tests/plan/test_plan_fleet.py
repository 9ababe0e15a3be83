"""The cheapest fleet, against brute force."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.core import ConfigError
from shoal.plan.fleet import Stock, cheapest, cost, pareto, smaller_by_one, within

stocks = st.lists(
    st.builds(Stock, price=st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.5]), most=st.integers(1, 5)),
    min_size=1,
    max_size=3,
)


def brute_force(stock, enough):
    fleets = product(*(range(kind.most + 1) for kind in stock))
    found = [fleet for fleet in fleets if any(fleet) and enough(fleet)]
    return min(((round(cost(stock, each), 9), sum(each)) for each in found), default=None)


@settings(max_examples=examples(300))
@given(stock=stocks, data=st.data())
def test_it_is_the_cheapest_of_all(stock, data):
    counts = st.tuples(*(st.integers(0, kind.most + 1) for kind in stock))
    corners = data.draw(st.lists(counts.filter(any), max_size=4))
    asked = []

    def enough(fleet):
        return any(within(corner, fleet) for corner in corners)

    def ask(fleet):
        assert any(fleet)
        asked.append(fleet)
        return enough(fleet)

    found = cheapest(stock, ask)
    wanted = brute_force(stock, enough)
    assert wanted == (None if found is None else (round(cost(stock, found), 9), sum(found)))
    assert found is None or enough(found)
    assert len(set(asked)) == len(asked)


def test_one_kind_is_bisected():
    asked = []

    def ask(fleet):
        asked.append(fleet)
        return fleet[0] >= 23

    assert cheapest([Stock(1.0, 64)], ask) == (23,)
    assert len(asked) <= 7


def test_nothing_is_enough():
    assert cheapest([Stock(1.0, 4), Stock(2.0, 4)], lambda fleet: False) is None


def test_without_kinds_there_is_nothing_to_buy():
    with pytest.raises(ConfigError, match="no devices"):
        cheapest([], lambda fleet: True)


def test_one_device_less():
    assert smaller_by_one((2, 0, 1)) == [(1, 0, 1), (2, 0, 0)]
    assert smaller_by_one((0, 1)) == []


def test_the_frontier_rises_with_cost():
    points = {(1,): (1.0, 0.5), (2,): (2.0, 0.4), (3,): (3.0, 0.9), (4,): (3.0, 0.8), (5,): (5.0, 0.9)}
    assert pareto(points) == [(1,), (3,)]
