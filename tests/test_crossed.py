"""Crossed parameters: what is quick among them."""

from itertools import product

import pytest

from crossed import crossed, each_nth, pairs


def quick(params):
    return [param.values for param in params if pytest.mark.slow not in param.marks]


def test_all_combinations_are_there_in_their_order():
    found = crossed("ab", [1, 2, 3])
    assert [param.values for param in found] == list(product("ab", [1, 2, 3]))


@pytest.mark.parametrize("axes", [["ab", range(5)], ["abc", range(3)], ["abcd", range(2), range(7)]])
def test_every_value_comes_in_no_more_than_the_longest_axis_needs(axes):
    chosen = quick(crossed(*axes))
    for at, axis in enumerate(axes):
        assert {values[at] for values in chosen} == set(axis)
    assert len(chosen) == max(map(len, axes))


def test_every_pair_of_values_comes():
    axes = ["abcd", range(2), range(3)]
    chosen = quick(crossed(*axes, of_each=2))
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        found = {(values[one], values[other]) for values in chosen}
        assert found == set(product(axes[one], axes[other]))
    assert len(chosen) < 4 * 2 * 3
    assert [param.values for param in pairs(*axes)] == chosen


def test_marks_of_values_stay():
    skipped = pytest.param("b", marks=pytest.mark.skip)
    found = crossed(["a", skipped], [1])
    assert [[mark.name for mark in param.marks] for param in found] == [[], ["skip"]]
    assert found[1].values == ("b", 1)


def test_what_may_be_skipped_stands_for_nothing_else():
    skipped = pytest.param(2, marks=pytest.mark.skip)
    chosen = quick(crossed("abc", [1, skipped]))
    assert {values[0] for values in chosen if values[1] == 1} == set("abc")
    assert len([values for values in chosen if values[1] == 2]) == 1


def test_tests_of_the_same_values_take_other_ones():
    parts = [quick(each_nth("abcde", 2, at=at)) for at in (0, 1)]
    assert parts == [[("a",), ("c",), ("e",)], [("b",), ("d",)]]
    assert [param.values for param in each_nth("ab", 2)] == [("a",), ("b",)]
