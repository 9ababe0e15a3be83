"""Searches for placements, against every placement there is."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_builders import RandomGroups, evaluator_of, problem_of, random_case

from hypothesis_profiles import examples
from shoal.core import ConfigError
from shoal.place.exhaustive import placements, search_exhaustive
from shoal.place.greedy import _configurations
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.memory import MemoryCheck
from shoal.place.neighbours import changes
from shoal.place.placement import Placement
from shoal.place.search import _neighbours, search, search_literal


def test_search_is_within_five_percent_of_the_best_placement_in_95_percent_of_cases():
    cases = 200
    close = 0
    for seed in range(cases):
        problem, evaluator = random_case(devices=1 + seed % 4, services=1 + seed // 4 % 4, seed=seed)
        best = search_exhaustive(problem, evaluator).estimate
        ours = search(problem, evaluator).estimate
        assert ours.attainment <= best.attainment
        equal = ours.attainment == best.attainment
        close += equal and ours.normalised_latency <= 1.05 * best.normalised_latency
    assert close >= 0.95 * cases


@settings(max_examples=examples(120))
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 1000))
def test_more_devices_never_lower_the_best_attainment_found(devices, services, seed):
    models = {f"s{at}": "llama-2-7b" for at in range(services)}
    attainments = []
    for count in (devices, devices + 1):
        evaluator = GroupwiseEvaluator(RandomGroups(list(models), seed))
        found = search(problem_of(models, count), evaluator)
        attainments.append(found.estimate.attainment)
    assert attainments[1] >= attainments[0]


def test_every_placement_of_two_devices_is_listed_once():
    problem = problem_of({"a": "llama-2-7b", "b": "llama-2-7b"}, devices=2)
    found = {
        tuple(sorted((group.tp, group.services) for group in placement.groups))
        for placement in placements(problem)
    }
    sets = [(), ("a",), ("b",), ("a", "b")]
    apart = {tuple(sorted([(1, x), (1, y)])) for x in sets for y in sets}
    assert found == apart | {((2, services),) for services in sets}
    assert len(found) == len(list(placements(problem)))


def test_large_services_get_groups_at_any_number_of_devices():
    """Each needs four devices: no single change leads there from a placement that has none for it."""
    models = {f"s{at}": "llama-2-70b" for at in range(3)}
    problem = replace(problem_of(models, devices=12, per_host=4), max_services=1)
    services = {
        name: replace(each, kv_floor_tokens=400_000) for name, each in problem.memory.services.items()
    }
    problem = replace(problem, memory=MemoryCheck(services))
    assert problem.memory.least_tp("s0", problem.cluster.devices, 4) == 4
    found = search(problem, evaluator_of(problem))
    assert found.placement.services == set(models)


@pytest.mark.parametrize("find", [search, search_literal])
def test_a_model_too_large_for_one_device_is_split_or_refused(find):
    evaluator = GroupwiseEvaluator(RandomGroups(["large"], 1))
    [group] = find(problem_of({"large": "llama-2-70b"}, devices=2), evaluator).placement.groups
    assert (group.tp, group.services) == (2, ("large",))
    with pytest.raises(ConfigError, match="no host has devices with memory for large"):
        find(problem_of({"large": "llama-2-70b"}, devices=2, per_host=1), evaluator)


def test_of_many_services_a_part_of_the_neighbours_is_looked_at():
    """Their weights take turns in the memory of two devices."""
    names = [f"s{at}" for at in range(36)]
    problem = problem_of(dict.fromkeys(names, "llama-2-7b"), devices=2)
    memory = replace(problem.memory, weights_limit_bytes=30 << 30)
    problem = replace(problem, memory=memory, max_services=36)
    first, second = problem.cluster.devices
    placement = Placement.sharing([([first], names[:18]), ([second], names[18:])])
    seen, others = (
        {str(each) for chunk in _neighbours(problem, placement, None, start) for each in chunk}
        for start in (0, 1)
    )
    every = [placement.changed(*change) for change in changes(problem, placement)]
    assert len(every) > 1000
    assert 300 < len(seen) <= 400
    assert seen.isdisjoint(others)
    assert seen | others < {str(each) for each in every}


@pytest.mark.parametrize(
    ("most", "limits"),
    [(1, [1]), (3, [1, 2, 3]), (8, [*range(1, 9)]), (100, [*range(1, 9), 16, 32, 64, 100])],
)
def test_numbers_of_services_per_group_that_are_tried(most, limits):
    problem = replace(problem_of({"a": "llama-2-7b"}, devices=1), max_services=most)
    assert _configurations(problem) == [(1, limit) for limit in limits]
