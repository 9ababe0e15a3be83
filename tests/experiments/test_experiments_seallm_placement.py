"""SeaLLM's cluster experiments: services, traffic, placement, and properties of their results."""

import pytest

from experiments import Effort, find
from experiments.result import Row
from experiments.seallm import end_to_end
from experiments.seallm.end_to_end import Point, factors, measure
from experiments.seallm.services import (
    MODELS,
    SERVICES,
    Traffic,
    by_service,
    cluster,
    memory_check,
    models,
    phases,
    popularity,
    served,
)
from experiments.seallm.systems import SYSTEMS, Placer, serve

SEALLM = pytest.param("seallm", 16, marks=pytest.mark.slow)


def test_there_are_16_services_four_of_each_model_in_nodes_of_eight():
    found = [model.name for model in models().values()]
    assert len(found) == SERVICES
    assert {found.count(name) for name in MODELS} == {4}
    assert {len(devices) for devices in cluster(32).hosts().values()} == {8}


def test_phases_follow_each_other_at_the_given_rate():
    traffic = Traffic(rate=50.0, phase_s=40.0, phases=2)
    first, second = phases(traffic)
    assert len(first) == pytest.approx(2000, rel=0.25)
    assert max(request.arrival_ns for request in first) < 40e9 <= min(r.arrival_ns for r in second)
    assert phases(traffic)[1] == second
    counts = {name: len(each) for name, each in by_service(first).items()}
    most = max(counts, key=lambda name: counts[name])
    shares = popularity(traffic)[0]
    assert most == max(shares, key=lambda name: shares[name])


def test_popularity_drifts_with_less_memory():
    def change(memory: float) -> float:
        before, after = popularity(Traffic(1.0, 1.0, memory=memory))
        return sum(abs(before[name] - after[name]) for name in before)

    assert change(1.0) == 0
    assert 0 < change(0.95) < change(0.2)


@pytest.mark.parametrize(("name", "devices"), [("vllm", 32), ("muxserve", 32), SEALLM])
def test_a_system_places_all_services_and_answers_all_requests(name, devices):
    before, now = phases(Traffic(rate=4.0, phase_s=4.0))
    found = Placer(SYSTEMS[name], devices).place(before, 4.0)
    assert found.placement.services == set(served())
    check = memory_check()
    for group in found.placement.groups:
        assert len(group.services) <= 2
        if name == "vllm":
            assert len(group.services) <= 1
        assert check.fits(group.services, group.shape.memory_bytes, group.tp)
    run = serve(SYSTEMS[name], found.placement, now)
    assert len(run.requests) == len(now)
    assert all(row.answered for row in run.requests)


def test_factors_are_the_largest_over_the_rates():
    def row(system, rate, latency, attainment):
        metrics = {"normalised_latency": latency, "p99": latency, "ttft": 1.0, "slo_attainment": attainment}
        return Row(config={"system": system, "rate": rate, "against": None}, metrics=metrics)

    rows = [row("a", 1, 2.0, 1.0), row("a", 2, 9.0, 0.25), row("b", 1, 1.0, 1.0), row("b", 2, 3.0, 0.5)]
    [found] = factors(rows, ["b"], {"a": {"latency_factor": 10.0}})
    assert (found.metrics["latency_factor"], found.metrics["attainment_factor"]) == (3.0, 2.0)


def test_end_to_end_has_the_metrics_of_the_paper(monkeypatch):
    def fake(point: Point):
        names = ("normalised_latency", "p99", "slo_attainment", "ttft", "tpot")
        return dict.fromkeys(names, 1.0 + (point.system in end_to_end.OURS))

    monkeypatch.setattr(end_to_end, "measure", fake)
    result = find(["seallm-end-to-end"])[0].run(Effort(quick=True))
    points = [row for row in result.rows if row.config["against"] is None]
    assert {row.config["system"] for row in points} == {"vllm", "alpaserve", "muxserve", "seallm", "shoal"}
    assert all(row.paper for row in result.rows if row.config["against"] is not None)
    assert measure is not fake
