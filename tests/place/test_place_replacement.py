"""When services are placed anew, and what is loaded for it."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_builders import problem_of

from hypothesis_profiles import examples
from shoal.core import ConfigError
from shoal.place.estimate import Estimate, ServiceEstimate
from shoal.place.placement import Placement
from shoal.place.re_placement import Hysteresis, IntervalRule, difference


def estimate(attainment: float, latency: float) -> Estimate:
    return Estimate({"s": ServiceEstimate(100, 100 * (1 - attainment), 100, 100 * latency)})


@pytest.mark.parametrize(
    ("guess", "real", "length_s"),
    [
        ((1.0, 1.0), (1.0, 1.0), 110),
        ((1.0, 1.0), (0.95, 1.05), 110),
        ((1.0, 1.0), (0.85, 1.0), 90),
        ((1.0, 1.0), (1.0, 1.2), 90),
        ((1.0, 1.0), (1.0, 0.8), 90),
        ((0.0, 1.0), (0.0, 1.0), 110),
        ((0.0, 1.0), (0.1, 1.0), 90),
    ],
)
def test_intervals_shrink_where_an_estimate_was_off_and_grow_elsewhere(guess, real, length_s):
    rule = IntervalRule(first_s=100, beta=0.1)
    assert rule.next_s(100, estimate(*guess), estimate(*real)) == pytest.approx(length_s)


def test_intervals_stay_within_their_bounds():
    rule = IntervalRule(first_s=100, least_s=95, most_s=105)
    assert rule.next_s(100, estimate(1, 1), estimate(1, 1)) == 105
    assert rule.next_s(100, estimate(1, 1), estimate(0, 1)) == 95
    with pytest.raises(ConfigError, match="intervals need"):
        IntervalRule(first_s=10, least_s=20)


def test_only_a_clear_gain_is_worth_a_change():
    rule = Hysteresis(attainment=0.02, latency=0.15)
    now = estimate(0.9, 2.0)
    assert rule.worthwhile(now, estimate(0.93, 3.0))
    assert rule.worthwhile(now, estimate(0.9, 1.6))
    assert not rule.worthwhile(now, estimate(0.91, 1.9))
    assert not rule.worthwhile(now, estimate(0.89, 1.0))


def test_the_same_groups_elsewhere_are_no_change():
    problem = problem_of(dict.fromkeys("abc", "llama-2-7b"), devices=4)
    d0, d1, d2, d3 = problem.cluster.devices
    before = Placement.sharing([([d0, d1], "a"), ([d2], "b"), ([d3], "c")])
    after = Placement.sharing([([d2, d3], "a"), ([d0], "c"), ([d1], "b")])
    change = difference(before, after, problem.memory)
    assert change.after == before
    assert (change.load_bytes, change.loads) == (0, {})
    assert set(change.kept) == set(before.groups)


def test_devices_are_regrouped_where_sizes_change():
    problem = problem_of(dict.fromkeys("ab", "llama-2-7b"), devices=4, per_host=2)
    d0, d1, d2, d3 = problem.cluster.devices
    before = Placement.sharing([([d0], "a"), ([d1], "b"), ([d2], "a"), ([d3], "b")])
    after = Placement.sharing([([d0, d1], "a"), ([d2], "b"), ([d3], "a")])
    change = difference(before, after, problem.memory)
    assert sorted((group.tp, group.services) for group in change.after.groups) == [
        (1, ("a",)),
        (1, ("b",)),
        (2, ("a",)),
    ]
    assert {device.name for group in change.after.groups for device in group.devices} == {
        "d00",
        "d01",
        "d02",
        "d03",
    }
    weights = problem.memory.services["a"].model.weight_bytes()
    assert weights <= change.load_bytes <= 2 * weights


SETS = st.sampled_from([(), ("a",), ("b",), ("c",), ("a", "b"), ("b", "c")])


@settings(max_examples=examples(300))
@given(st.lists(SETS, min_size=4, max_size=4), st.lists(SETS, min_size=4, max_size=4))
def test_as_little_is_loaded_as_in_the_best_of_all_assignments(old, new):
    models = {"a": "llama-2-7b", "b": "llama-2-13b", "c": "opt-6.7b"}
    problem = problem_of(models, devices=4)
    devices = problem.cluster.devices
    bytes_of = {name: service.model.weight_bytes() for name, service in problem.memory.services.items()}

    def loaded(order):
        there = dict(zip(order, old, strict=True))
        return sum(bytes_of[name] for at in order for name in new[at] if name not in there[at])

    before, after = (
        Placement.sharing([([device], services) for device, services in zip(devices, each, strict=True)])
        for each in (old, new)
    )
    change = difference(before, after, problem.memory)
    assert change.load_bytes == min(loaded(order) for order in permutations(range(4)))
