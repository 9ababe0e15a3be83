"""SeaLLM's sharing group experiments: workload, systems, and properties of their results."""

import itertools
from collections import Counter

import numpy as np
import pytest

from experiments import Effort, find
from experiments.seallm import schedulers, slo_scale
from experiments.seallm.group_runs import Measured, Point, measure
from experiments.seallm.sharing_group import (
    MODELS,
    SYSTEMS,
    FractionOf,
    execution_times,
    simulate,
)
from experiments.seallm.workload import (
    CONTEXT,
    Traffic,
    k_means,
    lengths_of,
    longbench,
    requests_of,
    sharegpt,
)
from shoal.forecast import StepRows
from shoal.forecast.device_specs import device_spec
from shoal.forecast.model_spec import model_spec
from shoal.forecast.roofline import RooflineTimes

NAMES = ("seallm-schedulers", "seallm-skew", "seallm-slo-scale", "seallm-variance")
LIGHT = Traffic(rate=3.0, seconds=2.0)


def test_lengths_have_the_means_of_the_papers_table():
    prompts, outputs = sharegpt().mean(axis=0)
    assert prompts == pytest.approx(73.0, rel=0.02)
    assert outputs == pytest.approx(426.9, rel=0.03)  # some are cut
    summaries = longbench()
    assert summaries[:, 1].mean() == pytest.approx(21.1, rel=0.05)
    assert (summaries.sum(axis=1) <= CONTEXT).all()
    assert np.median(summaries[:, 0]) > 3_900  # the paper's mean is far beyond the context


def test_k_means_separates_two_clouds_and_keeps_every_point():
    rng = np.random.default_rng(0)
    near = np.stack([rng.integers(5, 15, 40), rng.integers(90, 110, 40)], axis=1)
    far = np.stack([rng.integers(5, 15, 60), rng.integers(900, 1100, 60)], axis=1)
    mixed = rng.permutation(np.concatenate([far, near]))
    short, long = k_means(mixed, 2)
    assert sorted(map(tuple, short)) == sorted(map(tuple, near))
    assert sorted(map(tuple, long)) == sorted(map(tuple, far))


def test_k_means_ends_with_every_point_nearest_to_its_own_centre():
    clusters = k_means(sharegpt(), 3)
    centres = np.stack([cluster.mean(axis=0) for cluster in clusters])
    for number, cluster in enumerate(clusters):
        distances = ((cluster[:, None, :] - centres[None]) ** 2).sum(axis=2)
        assert (distances.argmin(axis=1) == number).all()
    assert [cluster[:, 1].mean() for cluster in clusters] == sorted(c[:, 1].mean() for c in clusters)


def test_a_higher_rate_has_the_same_requests_closer_together():
    slow, fast = (requests_of("chats", Traffic(rate, 8.0)) for rate in (2.0, 4.0))
    for name in lengths_of("chats"):
        few, many = ([one for one in requests if one.service == name] for requests in (slow, fast))
        assert 0 < len(few) <= len(many)
        for one, other in zip(few, many, strict=False):
            assert one.true_output_tokens == other.true_output_tokens
            assert one.arrival_ns == pytest.approx(2 * other.arrival_ns, abs=len(many))


def test_consecutive_requests_are_of_one_service():
    services = [one.service for one in requests_of("chats", Traffic(20.0, 8.0, consecutive=8))]
    runs = [services[at : at + 8] for at in range(0, len(services), 8)]
    assert len(runs) > 4
    assert all(len(set(run)) == 1 for run in runs)
    assert all(run[0] != after[0] for run, after in itertools.pairwise(runs))


def test_shares_divide_the_rate():
    shares = {"short-chat": 0.9, "long-chat": 0.1}
    counts = Counter(one.service for one in requests_of("chats", Traffic(50.0, 40.0, cv=1.0, shares=shares)))
    assert counts["short-chat"] / counts.total() == pytest.approx(0.9, abs=0.03)


def test_errors_change_only_outputs():
    exact, wrong = (requests_of("chats", Traffic(20.0, 8.0, output_deviation=d)) for d in (0.0, 4.0))
    assert [(a.id, a.arrival_ns, len(a.prompt)) for a in exact] == [
        (b.id, b.arrival_ns, len(b.prompt)) for b in wrong
    ]
    lengths = [(len(b.prompt), b.true_output_tokens) for b in wrong]
    assert all(output >= 1 and prompt + output <= CONTEXT for prompt, output in lengths)
    ratios = np.array(
        [b.true_output_tokens / a.true_output_tokens for a, b in zip(exact, wrong, strict=True)]
    )
    # Below zero with probability Phi(-1/4), about 40%.
    assert 0.25 < np.mean(ratios < 0.2) < 0.6
    assert ratios.max() > 3


def test_execution_time_is_that_of_the_mean_request_alone_on_one_gpu():
    for group, models in MODELS.items():
        for name, seconds in execution_times(group).items():
            prompt, output = (
                round(np.mean(side)) for side in zip(*lengths_of(group)[name].pairs, strict=True)
            )
            times = RooflineTimes(model_spec(models[name]), device_spec("a800"))
            steps = [times.step_time(StepRows(0, 0, ((prompt, 0),), 1))]
            steps += [times.step_time(StepRows(1, prompt + n, (), 1)) for n in range(1, output)]
            assert seconds == pytest.approx(sum(steps))


def test_a_fraction_of_the_compute_takes_longer_by_as_much():
    times = RooflineTimes(model_spec("llama-2-7b"), device_spec("a800"), 2)
    half = FractionOf(times, 0.5)
    rows = StepRows(3, 700, ((64, 0),), 4)
    assert half.step_time(rows) == pytest.approx(2 * times.step_time(rows))
    each = [half.step_time(StepRows(3, 700 + 3 * n, (), 3)) for n in range(4)]
    assert half.decode_times(3, 700, 4).tolist() == each


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_answers_the_same_requests(system):
    run = simulate("chats", system, LIGHT)
    expected = requests_of("chats", LIGHT)
    assert sorted(row.request_id for row in run.requests) == sorted(one.id for one in expected)
    assert all(row.answered for row in run.requests)
    assert {row.request_id: row.output_tokens for row in run.requests} == {
        one.id: one.true_output_tokens for one in expected
    }
    assert len(run.engines) == (1 if SYSTEMS[system].shares else 2)
    assert run.execution_s == execution_times("chats")


def test_attainment_counts_what_ended_within_the_scale():
    measured = Measured({}, (0.5, 2.0, 4.0, 9.0))
    assert [measured.attainment(scale) for scale in (0.4, 2.0, 5.0, 10.0)] == [0.0, 0.5, 0.75, 1.0]


def test_measurements_equal_those_of_the_run():
    point = Point("chats", "vllm", LIGHT)
    run, found = simulate("chats", "vllm", LIGHT), measure(point)
    normalised = [row.e2e_s / run.execution_s[row.service] for row in run.requests]
    assert found.metrics["normalised_latency"] == pytest.approx(np.mean(normalised))
    assert found.metrics["slo_attainment"] == pytest.approx(np.mean([one <= 5 for one in normalised]))
    assert found.attainment(5.0) == found.metrics["slo_attainment"]
    assert measure(point) == found


def test_attainment_never_falls_with_the_scale(monkeypatch):
    systems = ("vllm", "shoal")
    monkeypatch.setattr(slo_scale, "SYSTEMS", systems)
    result = find(["seallm-slo-scale"])[0].run(Effort(quick=True))
    by_system: dict[object, list[float]] = {}
    for row in result.rows:
        by_system.setdefault(row.config["scheduler"], []).append(row.metrics["slo_attainment"])
    assert set(by_system) == set(systems)
    assert all(values == sorted(values) and values[-1] > 0 for values in by_system.values())
    assert [len(panel.series) for row in result.panels for panel in row] == [2]


def test_factors_are_the_largest_ratios_over_the_rates(monkeypatch):
    """At the lower rate all are equal; at the higher one the systems are 2, 3, 4, ... times slower."""
    order = list(SYSTEMS)
    low = min(rate for rates in schedulers.QUICK_RATES.values() for rate in rates)

    def fake(name, points, effort):
        found = []
        for point in points:
            slow = 1.0 if point.traffic.rate == low else 2.0 + order.index(point.system)
            metrics = {
                "normalised_latency": slow,
                "normalised_latency_p99": 3 * slow,
                "ttft_s": 0.1 * slow**2,
                "tpot_s": 0.02,
                "slo_attainment": 1 / slow,
            }
            found.append(Measured(metrics, (slow,)))
        return found

    monkeypatch.setattr(schedulers, "measure_all", fake)
    result = find(["seallm-schedulers"])[0].run(Effort(quick=True))
    factors = [row for row in result.rows if row.config["against"] is not None]
    assert {row.config["against"] for row in factors} == {
        "vllm",
        "alpaserve",
        "muxserve",
        "fcfs",
        "fastserve",
    }
    assert {row.config["scheduler"] for row in factors} == {"seallm", "seallm-join", "shoal"}
    for row in factors:
        ours, theirs = (2.0 + order.index(row.config[key]) for key in ("scheduler", "against"))
        ratio = max(1.0, theirs / ours)
        assert row.metrics["latency_factor"] == pytest.approx(ratio)
        assert row.metrics["p99_factor"] == pytest.approx(ratio)
        assert row.metrics["ttft_factor"] == pytest.approx(ratio**2)
        assert row.metrics["attainment_factor"] == pytest.approx(ratio)
    assert {row.paper["latency_factor"] for row in factors} == {10.38, 9.52, 13.60, 4.17}
    measured = [row for row in result.rows if row.config["against"] is None]
    assert len(measured) == 2 * len(SYSTEMS)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_names_its_paper(name):
    [found] = find([name])
    assert found.name == name
    assert "SeaLLM" in found.paper
