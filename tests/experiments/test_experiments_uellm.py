"""UELLM's device maps: the paper's table, and the order of our results."""

import pytest

from experiments import Effort, Result, Row
from experiments.registry import REPRODUCTIONS
from experiments.uellm.systems import EVEN, HELR, SEARCHED, mapped_models
from experiments.uellm.testbed import GB, LAYERS, busy_share, even_map, four_devices, pair_problem
from shoal.place.device_maps import DEVICE_MAPS, OBJECTIVES, find_map

QUICK = Effort(quick=True)


@pytest.fixture(scope="module")
def deployment() -> Result:
    return REPRODUCTIONS["uellm-deployment"].run(QUICK)


def rows_of(result: Result, devices: str) -> list[Row]:
    return [row for row in result.rows if row.config["devices"] == devices]


def test_table_1_is_reproduced_within_four_percent(deployment: Result) -> None:
    rows = rows_of(deployment, "Table 1")
    assert len(rows) == 5
    for row in rows:
        assert row.metrics["tokens_per_s"] == pytest.approx(row.paper["tokens_per_s"], rel=0.04)


def test_the_search_finds_the_papers_best_map() -> None:
    for name in ("helr", "lr", "cost"):
        (first, second) = DEVICE_MAPS[name](pair_problem(LAYERS - 1)).stages
        assert {first.device: first.layers, second.device: second.layers} == {"GPU#0": 32, "GPU#1": 1}
    assert DEVICE_MAPS["helr"](pair_problem(LAYERS)).devices == ("GPU#0",)


def test_helr_is_between_he_and_lr(deployment: Result) -> None:
    busy = {row.config["map"]: row.metrics for row in rows_of(deployment, "some free")}
    assert set(busy) == set(DEVICE_MAPS)
    throughput = [busy[name]["tokens_per_s"] for name in ("greedy", "he", "helr", "lr", "cost")]
    assert throughput == sorted(throughput)
    assert throughput[2] > 0.95 * throughput[3]
    utilisation = [busy[name]["utilisation"] for name in ("he", "helr", "lr", "cost")]
    assert utilisation == sorted(utilisation, reverse=True)
    assert utilisation[1] > 0.95 * utilisation[0]


def test_a_quarter_of_an_even_map_computes_at_a_time() -> None:
    problem = four_devices([24 * GB] * 4)
    even = even_map(problem, 4)
    assert [stage.layers for stage in even.stages] == [9, 8, 8, 8]
    assert busy_share(problem, even) == pytest.approx(0.25, rel=0.01)
    alone = find_map(problem, OBJECTIVES["helr"])
    assert alone.exact
    assert alone.device_map.devices == ("GPU#0",)
    assert busy_share(problem, alone.device_map) == 1.0


@pytest.fixture(scope="module")
def end_to_end() -> Result:
    return REPRODUCTIONS["uellm-end-to-end"].run(QUICK)


@pytest.mark.parametrize("waiting", [64, 128, 256])
def test_device_map_and_batching_add_up(end_to_end: Result, waiting: int) -> None:
    found = {row.config["system"]: row.metrics for row in end_to_end.rows if row.config["waiting"] == waiting}
    assert found["ub"]["slo_attainment"] < found["ua"]["slo_attainment"] <= found["alone"]["slo_attainment"]
    assert found["ud"]["slo_attainment"] < found["ua"]["slo_attainment"]
    for base in ("s3", "morphling", "ub"):
        assert found["ua"]["mean_latency_s"] < found[base]["mean_latency_s"]
        assert found["ua"]["tokens_per_s"] > found[base]["tokens_per_s"]
    assert found["shoal"]["latency_cut_s3"] > 0.723
    assert found["shoal"]["throughput_over_s3"] > 1.92
    assert 1.2 < found["ua"]["utilisation_over_s3"] < 4.1


def test_morphling_is_ud_after_its_stress_tests(end_to_end: Result) -> None:
    mapped = mapped_models()
    assert mapped[SEARCHED].device_map == mapped[HELR].device_map
    assert mapped[SEARCHED].tests_s > 100
    for row in end_to_end.rows:
        if row.config["system"] == "ud":
            ud = row.metrics
            (morphling,) = (
                other.metrics
                for other in end_to_end.rows
                if other.config == {"waiting": row.config["waiting"], "system": "morphling"}
            )
            assert morphling["slo_attainment"] == ud["slo_attainment"]
            waited_s = morphling["mean_latency_s"] - ud["mean_latency_s"]
            assert waited_s == pytest.approx(mapped[SEARCHED].tests_s)


def test_memory_for_kv_is_that_of_the_devices_in_use() -> None:
    mapped = mapped_models()
    alone, even = mapped[HELR].kv_bytes, mapped[EVEN].kv_bytes
    assert even - alone == 3 * 23 * GB
    assert mapped[HELR].slowdown == pytest.approx(1.0)
    assert mapped[EVEN].slowdown == pytest.approx(1.46, rel=0.02)
