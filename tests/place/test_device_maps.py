"""Device maps against every map there is, and what is known of large ones."""

from itertools import permutations
from random import Random

import numpy as np
import pytest
from device_map_builders import SPEEDS, cheapest_by_devices, classes_problem, problem, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.core import ConfigError
from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.forecast import model_spec
from shoal.place.device_maps import (
    DEVICE_MAPS,
    OBJECTIVES,
    MapProblem,
    Stage,
    find_map,
    greedy_map,
    problem_of,
)
from shoal.place.device_maps.classes import Classes
from shoal.place.device_maps.costs import Costs
from shoal.place.device_maps.layers import layers_counts
from shoal.place.device_maps.problem import evaluate, stages_of
from shoal.place.device_maps.shorten_path import shorter_path
from shoal.place.device_maps.uneven import uneven_counts

HELR, COST = OBJECTIVES["helr"], OBJECTIVES["cost"]


def assert_best(of: MapProblem) -> None:
    """Every objective's map is as good as the best of all maps, and says so."""
    cheapest = cheapest_by_devices(of)
    for objective in OBJECTIVES.values():
        if not cheapest:
            with pytest.raises(ConfigError, match="do not fit"):
                find_map(of, objective)
            continue
        weights = objective.weights(Costs.of(of))
        found = find_map(of, objective)
        best = min(weights.score(cost_s, devices) for devices, cost_s in cheapest.items())
        assert found.score == pytest.approx(best, rel=1e-9)
        assert found.exact
        again = evaluate(of, found.device_map.stages)
        assert weights.score(again.cost_s, len(again.stages)) == found.score


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=examples(150))
def test_every_objective_finds_the_best_of_all_maps(seed: int, uniform: bool) -> None:
    assert_best(random_problem(seed, 5, 6, uniform))


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [True, False])
def test_every_objective_finds_the_best_of_all_maps_of_up_to_seven_devices(uniform: bool) -> None:
    for seed in range(400):
        assert_best(random_problem(seed, 7, 7, uniform))


@given(st.integers(0, 10**6), st.sampled_from(list(OBJECTIVES)))
@settings(max_examples=examples(100))
def test_the_search_by_visits_agrees_with_the_search_by_devices(seed: int, name: str) -> None:
    of = classes_problem(seed, classes=3, size=4, layers=9)
    costs = Costs.of(of)
    weights = OBJECTIVES[name].weights(costs)
    counts = layers_counts(costs, Classes.of(costs), weights)
    stages = stages_of([(costs.devices[device].name, layers) for device, layers in counts])
    found = find_map(of, OBJECTIVES[name])
    assert found.exact
    assert found.score == pytest.approx(weights.score(evaluate(of, stages).cost_s, len(stages)), rel=1e-9)


@given(st.integers(0, 10**6), st.sampled_from(list(OBJECTIVES)))
@settings(max_examples=examples(100))
def test_what_filling_fits_is_fitted_and_bounded_without_exact_search(seed: int, name: str) -> None:
    of = random_problem(seed, 6, 7, uniform=False)
    try:
        greedy = greedy_map(of)
    except ConfigError:
        return
    costs = Costs.of(of)
    weights = OBJECTIVES[name].weights(costs)
    counts, bound = uneven_counts(costs, weights)
    assert weights.score_of(costs, counts) <= weights.score(greedy.cost_s, len(greedy.stages)) * (1 + 1e-9)
    best = min(weights.score(cost_s, devices) for devices, cost_s in cheapest_by_devices(of).items())
    assert bound <= best * (1 + 1e-9)


def test_where_no_map_is_found_that_does_not_mean_that_there_is_none() -> None:
    # Each device has room for one layer, of which there are more, though not more bytes.
    sizes, devices = [3, 4] * 10, 17  # two small ones would fit, but are not neighbours
    links = {(i, j): 1.0 + i * j for j in range(devices) for i in range(j)}
    with pytest.raises(ConfigError, match="20 layers of 70 bytes hardly fit, and no map was found"):
        find_map(problem([6] * devices, ["slow"] * devices, links, sizes), HELR)
    with pytest.raises(ConfigError, match="do not fit"):
        find_map(problem([6] * devices, ["slow"] * devices, {}, sizes), HELR)


def test_a_class_is_come_back_to_where_it_is_the_hub() -> None:
    # Devices 0 to 2 are near to each of the hub's (3 and 4), and far from each other.
    near = {(i, hub): 1.0 for i in range(3) for hub in (3, 4)}
    far = {(0, 1): 50.0, (0, 2): 51.0, (1, 2): 52.0, (3, 4): 1.0}
    found = find_map(problem([3] * 5, ["slow"] * 5, near | far, [3] * 5), COST)
    assert found.device_map.cost_s == 5 * 3.0 + 4 * 1.0
    assert found.exact


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_hundreds_of_devices_in_a_few_classes_are_exact(name: str) -> None:
    of = classes_problem(1, classes=5, size=40, layers=60)
    found = find_map(of, OBJECTIVES[name])
    assert found.exact
    assert found.device_map.cost_s == pytest.approx(evaluate(of, found.device_map.stages).cost_s)


def test_any_number_of_hosts_is_exact() -> None:
    random = Random(5)
    devices = [
        Device(
            name=f"h{host}-{at}",
            kind=random.choice(list(SPEEDS)),
            host=f"h{host}",
            memory_bytes=random.randint(3, 9),
        )
        for host in range(25)
        for at in range(4)
    ]
    cluster = ClusterSpec(devices=devices, host_link=Link(1.0, 0.2), network=Link(1.0, 3.0))
    of = MapProblem(cluster=cluster, layer_bytes=[3] * 60, bytes_per_s=SPEEDS)
    found = {name: find_map(of, objective) for name, objective in OBJECTIVES.items()}
    assert all(one.exact for one in found.values())
    assert found["cost"].device_map.cost_s <= found["lr"].device_map.cost_s < greedy_map(of).cost_s
    devices_used = {name: len(one.device_map.devices) for name, one in found.items()}
    assert devices_used["he"] <= devices_used["helr"] <= devices_used["lr"]


@pytest.mark.parametrize("layers", [5, 40])
def test_what_is_too_large_has_a_bound_beside_it(layers: int) -> None:
    random = Random(layers)
    n = 24
    times_s = {(i, j): random.uniform(1, 9) for i in range(n) for j in range(i + 1, n)}
    kinds = [random.choice(list(SPEEDS)) for _ in range(n)]
    of = problem([random.randint(6, 9) for _ in range(n)], kinds, times_s, [3] * layers)
    found = find_map(of, COST)
    assert not found.exact
    assert 0.3 * found.score < found.bound < found.score
    assert found.device_map.cost_s < 0.8 * greedy_map(of).cost_s


def test_uneven_layers_of_many_devices_have_a_bound() -> None:
    of = classes_problem(2, classes=4, size=10, layers=30)
    sizes = [6, *[3] * 28, 6]
    uneven = MapProblem(cluster=of.cluster, layer_bytes=sizes, bytes_per_s=of.bytes_per_s)
    for objective in OBJECTIVES.values():
        found = find_map(uneven, objective)
        assert evaluate(uneven, found.device_map.stages) == found.device_map
        assert 0.75 * found.score < found.bound <= found.score


@given(st.integers(0, 10**6), st.sampled_from(list(OBJECTIVES)))
@settings(max_examples=examples(50))
def test_the_bound_for_uneven_layers_is_one(seed: int, name: str) -> None:
    of = random_problem(seed, 5, 6, uniform=False)
    cheapest = cheapest_by_devices(of)
    if not cheapest:
        return
    costs = Costs.of(of)
    weights = OBJECTIVES[name].weights(costs)
    best = min(weights.score(cost_s, devices) for devices, cost_s in cheapest.items())
    counts, bound = uneven_counts(costs, weights)
    assert bound <= best * (1 + 1e-9)
    if counts:
        stages = stages_of([(costs.devices[device].name, layers) for device, layers in counts])
        score = weights.score(evaluate(of, stages).cost_s, len(stages))
        assert score == pytest.approx(weights.score_of(costs, counts))
        assert best <= score * (1 + 1e-9)


def test_memory_in_reserve_and_activations_count() -> None:
    links = {(0, 1): 1.0}
    alone = problem([9, 9], ["quick", "slow"], links, [3, 3, 3])
    assert find_map(alone, HELR).device_map.stages == (Stage("d0", 0, 3),)
    reserved = problem([9, 9], ["quick", "slow"], links, [3, 3, 3], reserve_bytes=3, activation_bytes=5)
    found = find_map(reserved, HELR).device_map
    assert {stage.device: stage.layers for stage in found.stages} == {"d0": 2, "d1": 1}
    assert found.cost_s == pytest.approx(6 / 4 + 3 / 1 + 1.0 + 5.0)


def test_objectives_differ_where_the_fast_devices_are_small() -> None:
    # One slow device has room for all; two fast ones share it, at a link of a third of what they save.
    links_s = {(0, 1): 5.0, (0, 2): 5.0, (1, 2): 5.0}
    of = problem([30, 15, 15], ["slow", "middling", "middling"], links_s, [3] * 10)
    devices = {name: find(of).devices for name, find in DEVICE_MAPS.items()}
    assert devices["he"] == ("d0",) == devices["greedy"]
    assert set(devices["cost"]) == set(devices["lr"]) == {"d1", "d2"}


def test_greedy_fills_the_largest_memory_first() -> None:
    of = problem([6, 12, 9], ["quick", "slow", "quick"], {}, [3] * 6)
    assert greedy_map(of).stages == (Stage("d1", 0, 4), Stage("d2", 4, 2))
    with pytest.raises(ConfigError, match="10 layers of 30 bytes do not fit"):
        greedy_map(problem([6, 12, 9], ["quick", "slow", "quick"], {}, [3] * 10))


def test_the_shortest_way_over_a_line_is_found_from_any_order() -> None:
    place = np.array([0.0, 1.0, 3.0, 4.0, 8.0, 9.0])
    between = np.abs(place[:, None] - place[None, :])
    for path in permutations(range(6)):
        found = shorter_path(between, list(path))
        assert sorted(found) == list(range(6))
        length = float(between[found[:-1], found[1:]].sum())
        assert length <= float(between[path[:-1], path[1:]].sum())
        assert length == 9.0


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((Stage("d0", 0, 2), Stage("d0", 2, 1)), "each once"),
        ((Stage("x", 0, 3),), "devices of the cluster"),
        ((Stage("d0", 0, 2),), "every layer once"),
        ((Stage("d0", 0, 1), Stage("d1", 2, 1)), "every layer once"),
        ((Stage("d1", 0, 3),), "no room"),
    ],
)
def test_what_is_no_map_is_refused(stages: tuple[Stage, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        evaluate(problem([9, 6], ["quick", "slow"], {}, [3, 3, 3]), stages)


def test_what_is_no_problem_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers"):
        problem([9], ["quick"], {}, [])
    with pytest.raises(ConfigError, match=r"kind 'abacus'.*quick"):
        problem([9], ["abacus"], {}, [3])
    with pytest.raises(ConfigError, match="negative"):
        problem([9], ["quick"], {}, [3], reserve_bytes=-1)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "smollm2-135m", "mixtral-8x7b"])
def test_a_models_layers_have_all_its_weights(name: str) -> None:
    model = model_spec(name)
    cluster = problem([1], ["quick"], {}, [1]).cluster
    found = problem_of(model, cluster, SPEEDS, reserve_bytes=7)
    assert sum(found.layer_bytes) == pytest.approx(model.weight_bytes(), rel=1e-9)
    assert len(found.layer_bytes) == model.layers
    assert found.layer_bytes[0] > found.layer_bytes[1]
    assert (found.layer_bytes[-1] == found.layer_bytes[1]) == model.tied
    assert (found.reserve_bytes, found.activation_bytes) == (7, 2 * model.hidden)
