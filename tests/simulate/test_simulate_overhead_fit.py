"""What a host adds is found again from the times of requests, and from nothing else."""

from dataclasses import dataclass, replace

import pytest
from simulate_builders import TIMES, make_request, make_spec, make_workload

from shoal.core import ConfigError, Request, RequestRecord
from shoal.forecast import HostOverhead, OverheadTimes, StepRows, StepTimes
from shoal.forecast.latency import FloatArray
from shoal.measure import RunRecord
from shoal.simulate import OpenLoop, Simulation, Watch, fit_overhead

LAYERS = 20


def simulate(requests: list[Request], overhead: HostOverhead, depth: int = 1, blocks: int = 400) -> RunRecord:
    times = OverheadTimes(TIMES, overhead, LAYERS)
    spec = make_spec(blocks, times=times, depth=depth, max_batched_tokens=64)
    return Simulation([spec], OpenLoop(requests), watch=Watch(spans=True)).run()


def measured(requests: list[Request], overhead: HostOverhead, **more: int) -> list[RequestRecord]:
    return sorted(simulate(requests, overhead, **more).requests, key=lambda row: row.arrival_ns)


@pytest.mark.parametrize("blocks", [400, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("step_ms", "layer_us"), [(0.0, 0.0), (2.0, 0.0), (0.0, 150.0), (0.7, 180.0), (3.0, 300.0)]
)
def test_an_overhead_is_found_again(step_ms: float, layer_us: float, blocks: int) -> None:
    """Also with 60 blocks, where most are preempted and a little time more makes another schedule."""
    overhead = HostOverhead(step_s=step_ms / 1e3, layer_s=layer_us / 1e6)
    requests = make_workload(120, rate=25.0, seed=3)
    log = measured(requests, overhead, blocks=blocks)
    fit = fit_overhead(log, lambda tried: simulate(requests, tried, blocks=blocks), LAYERS)
    assert fit.overhead.step_s == pytest.approx(overhead.step_s, abs=3e-4)
    assert fit.overhead.layer_s == pytest.approx(overhead.layer_s, abs=3e-5)
    assert fit.overhead.prompt_s == 0
    assert fit.error <= max(fit.error_without / 2, 1e-12)


def test_the_first_requests_are_enough() -> None:
    overhead = HostOverhead(step_s=1e-3, layer_s=2e-4)
    requests = make_workload(120, rate=25.0, seed=5)
    log = measured(requests, overhead, depth=2)
    fit = fit_overhead(log[:50], lambda tried: simulate(requests, tried, depth=2), LAYERS)
    assert fit.overhead.step_s == pytest.approx(1e-3, abs=3e-4)
    assert fit.overhead.layer_s == pytest.approx(2e-4, abs=3e-5)
    assert fit.intervals <= 100


def test_an_engine_that_is_faster_than_its_tables_has_no_overhead() -> None:
    requests = make_workload(60, seed=1)
    log = [
        replace(row, first_token_ns=row.arrival_ns + (row.first_token_ns - row.arrival_ns) // 2)
        for row in measured(requests, HostOverhead())
    ]
    fit = fit_overhead(log, lambda tried: simulate(requests, tried), LAYERS)
    assert fit.overhead == HostOverhead()


def test_a_log_of_other_requests_says_nothing() -> None:
    log = measured([make_request(99)], HostOverhead())
    with pytest.raises(ConfigError, match="no request of the log is answered in simulation"):
        fit_overhead(log, lambda tried: simulate([make_request(1)], tried), LAYERS)


@dataclass(frozen=True)
class SlowestRank:
    """A step of a group takes what the slowest of its ranks does."""

    times: StepTimes

    def step_time(self, rows: StepRows) -> float:
        return max(self.times.step_time(replace(one, others=())) for one in (rows, *rows.others))

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        return self.times.decode_times(sequences, context, steps)


def test_a_prompt_of_any_rank_costs_all_that_step_together() -> None:
    requests = make_workload(120, rate=40.0, seed=11)

    def group(overhead: HostOverhead) -> RunRecord:
        spec = make_spec(times=OverheadTimes(SlowestRank(TIMES), overhead, LAYERS), max_batched_tokens=64)
        watch = Watch(spans=True)
        return Simulation([spec] * 2, OpenLoop(requests), watch=watch, lock_step=True).run()

    overhead = HostOverhead(step_s=1e-3, layer_s=3e-4)
    log = sorted(group(overhead).requests, key=lambda row: row.arrival_ns)
    fit = fit_overhead(log, group, LAYERS, lock_step=True)
    assert fit.overhead.step_s == pytest.approx(1e-3, abs=3e-4)
    assert fit.overhead.layer_s == pytest.approx(3e-4, abs=3e-5)
