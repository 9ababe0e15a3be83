"""Mell's experiments: workload, capacities, forecasts, and the metrics of quick runs."""

import numpy as np
import pytest

from crossed import each_nth
from experiments import Effort, find
from experiments.mell import workload
from experiments.mell.setup import (
    POLICIES,
    Expectations,
    Point,
    Policy,
    assumptions,
    figures,
    measure,
    model_on_device,
    simulate,
    workloads,
)
from experiments.result import FULL
from shoal.core import ConfigError

QUICK = Effort(quick=True)
NAMES = (
    "mell-devices",
    "mell-migrations",
    "mell-epochs",
    "mell-utilisation",
    "mell-batching",
    "mell-timeline",
    "mell-served",
    "mell-hybrid",
)


def test_lengths_have_the_means_of_the_data_sets_ten_times() -> None:
    prompts, outputs = workload.lengths(200_000, 0)
    assert prompts.mean() == pytest.approx(10 * (69.5 + 295.6) / 2, rel=0.03)
    assert outputs.mean() == pytest.approx(10 * (214.5 + 441.3) / 2, rel=0.02)


def test_requests_fit_on_a_device_and_arrive_at_their_rate() -> None:
    requests = workload.mell_requests("poisson-0.8", 2000.0, 0, 16_000)
    assert len(requests) == pytest.approx(1600, rel=0.1)
    assert all(one.prompt_tokens + one.output_tokens <= 14_000 for one in requests)
    assert all(one.prompt_tokens <= 8_000 and one.output_tokens >= 1 for one in requests)
    assert max(one.prompt_tokens for one in requests) == 8_000
    arrivals = [one.arrival_s for one in requests]
    assert arrivals == sorted(arrivals)
    assert requests == workload.mell_requests("poisson-0.8", 2000.0, 0, 16_000)
    assert requests == workload.mell_requests(0.8, 2000.0, 0, 16_000)
    assert requests != workload.mell_requests("poisson-0.8", 2000.0, 1, 16_000)


@pytest.fixture
def azure_trace(tmp_path, monkeypatch):
    folder = tmp_path / "azure_llm_2023"
    folder.mkdir()
    lines = [f"2023-11-16 18:{n // 60:02}:{n % 60:02}.0000000,100,10" for n in range(1800) for _ in range(4)]
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines)
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(text)
    monkeypatch.setenv("SHOAL_TRACES", str(tmp_path))


def test_azures_arrivals_are_thinned(azure_trace) -> None:
    assert workloads(FULL) == workload.WORKLOADS
    requests = workload.mell_requests("azure", 600.0, 0, 16_000)
    assert len(requests) == pytest.approx(660, rel=0.15)
    assert 0 <= min(one.arrival_s for one in requests) <= max(one.arrival_s for one in requests) < 600
    assert not any("Skipped" in line for line in assumptions())


def test_without_its_trace_azure_is_skipped(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SHOAL_TRACES", str(tmp_path))
    assert workloads(FULL) == tuple(workload.POISSON_RATES)
    assert any("Skipped: azure" in line for line in assumptions())
    monkeypatch.setenv("SHOAL_TRACES", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no folder of traces"):
        workloads(FULL)


def test_capacity_is_the_memory_less_the_weights() -> None:
    small = model_on_device("llama2-7b")
    assert small.capacity * small.token_bytes + small.weight_bytes == pytest.approx(
        0.9 * small.memory_bytes, rel=1e-4
    )
    assert 0.010 < small.speed.step_s < 0.025
    assert model_on_device("llama2-13b").capacity < small.capacity


def test_forecasts_are_conditional_on_what_was_generated() -> None:
    expectations = Expectations(16_000)
    assert expectations.mean == pytest.approx(3200, rel=0.15)
    assert expectations.mean_growth(None, 10) == expectations.mean
    assert expectations.mean_growth(None, 9_000) == 9_000
    forecasts = [expectations.forecast(None, generated) for generated in range(0, 16_000, 500)]
    assert forecasts[0] == pytest.approx(expectations.mean, abs=1)
    assert all(np.diff(forecasts) >= 0)
    assert all(
        forecast > generated for forecast, generated in zip(forecasts, range(0, 16_000, 500), strict=True)
    )


def test_means_are_over_seeds() -> None:
    point = Point("poisson-1.1", "llama2-7b", Policy("mell"), 40.0, 2)
    runs = [figures(point, simulate(point, seed)) for seed in range(2)]
    assert measure(point) == {name: (runs[0][name] + runs[1][name]) / 2 for name in runs[0]}


def test_mell_needs_fewer_devices_than_baselines_that_hardly_preempt() -> None:
    found = {
        policy: measure(Point("poisson-1.1", "llama2-7b", policy, 200.0, 1))
        for policy in POLICIES
        if policy.policy in ("mell", "mell-forecast") or policy.fits == "reserve-mean"
    }
    ours = found[Policy("mell")]
    assert ours["preemptions_per_request"] == 0
    assert ours["kv_utilisation"] > 0.8
    assert ours["lower_bound_peak"] <= ours["peak_devices"] <= 1.1 * ours["lower_bound_peak"] + 1
    for policy, theirs in found.items():
        if policy.fits == "reserve-mean":
            assert theirs["peak_devices"] > 1.15 * ours["peak_devices"]


@pytest.mark.parametrize("name", each_nth(NAMES, 3))
def test_a_quick_run_has_every_metric(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SHOAL_TRACES", str(tmp_path))
    (reproduction,) = find([name])
    result = reproduction.run(QUICK)
    assert result.name == name
    assert result.rows
    for row in result.rows:
        assert all(value is not None for value in row.metrics.values())
        assert set(row.paper or ()) <= {*row.metrics} | {
            f"{metric}{end}" for metric in row.metrics for end in ("_least", "_most")
        }
    assert result.to_json()
