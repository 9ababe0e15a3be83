"""Placements of other systems."""

from dataclasses import replace

import pytest
from placement_builders import RandomGroups, problem_of, random_case

from shoal.place.baselines import even_split, tight
from shoal.place.estimate import Objective
from shoal.place.greedy import alpaserve, muxserve
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.place.problem import best_of, run_searches
from shoal.place.search import search, search_literal


def _run(searches, problem, seed=0):
    evaluator = GroupwiseEvaluator(RandomGroups(list(problem.rates), seed))
    return best_of(run_searches(searches, evaluator), problem.objective).placement


def test_an_even_split_shares_nothing():
    models = {f"s{at}": "llama-2-7b" for at in range(4)}
    problem = problem_of(models, devices=8)
    placement = _run([even_split(problem)], problem)
    assert sorted((group.tp, group.services) for group in placement.groups) == [
        (2, (name,)) for name in sorted(models)
    ]


def test_an_even_split_gives_large_models_what_they_need():
    problem = problem_of({"large": "llama-2-70b", "a": "llama-2-7b", "b": "llama-2-7b"}, devices=4)
    placement = _run([even_split(problem)], problem)
    assert {group.services: group.tp for group in placement.groups} == {("large",): 2, ("a",): 1, ("b",): 1}


def test_an_even_split_passes_over_devices_that_are_too_small():
    problem = problem_of({"a": "llama-2-13b"}, devices=3)
    small = replace(problem.cluster.devices[0], memory_bytes=24 << 30, host="small")
    devices = [small, *problem.cluster.devices[1:]]
    problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    for searches in ([even_split(problem)], [tight(problem)]):
        placement = _run(searches, problem)
        assert {name for group in placement.groups for name in group.services} == {"a"}
        assert sorted(device.name for group in placement.groups for device in group.devices) == [
            "d00",
            "d01",
            "d02",
        ]


def test_muxserve_puts_the_largest_demand_alone():
    models = {"busy": "llama-2-7b", "calm": "llama-2-7b", "idle": "llama-2-7b"}
    problem = problem_of(models, devices=2)
    [search_of_one, _] = muxserve(problem, {"busy": 5.0, "calm": 2.0, "idle": 1.0})
    placement = _run([search_of_one], problem)
    assert {group.services for group in placement.groups} == {("busy",), ("calm", "idle")}


def test_no_baseline_beats_the_search_in_random_cases():
    for seed in range(12):
        problem, evaluator = random_case(devices=8, services=4, seed=seed)
        best = search(problem, evaluator)
        for searches in ([even_split(problem)], muxserve(problem, problem.rates)):
            found = best_of(run_searches(searches, evaluator), problem.objective)
            assert found.estimate.attainment <= best.estimate.attainment
        for found in (
            best_of(run_searches(alpaserve(problem), evaluator), problem.objective),
            search_literal(problem, evaluator),
        ):
            assert found.estimate.attainment <= best.estimate.attainment


@pytest.mark.slow
def test_with_a_floor_every_service_is_placed():
    for seed in range(12):
        problem, evaluator = random_case(devices=8, services=4, seed=seed)
        careful = replace(problem, objective=Objective(floor=0.5))
        found, free = search(careful, evaluator), search(problem, evaluator)
        short = [
            sum(max(0.0, 0.5 - each.attainment) for each in estimate.services.values())
            for estimate in (found.estimate, free.estimate)
        ]
        assert short[0] <= short[1]
        assert found.placement.services == set(problem.rates) or short[0] > 0
