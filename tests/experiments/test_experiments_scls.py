"""SCLS's and UELLM's experiments: engine times, memory, workloads, and the order of their results."""

import pytest

from experiments import Effort, Result
from experiments.padded.presets import static_preset
from experiments.registry import REPRODUCTIONS
from experiments.scls.ils import RaggedTimes
from experiments.scls.setup import ENGINES, memory_of, run_static
from experiments.scls.workload import Lognormal, codefuse_requests
from experiments.uellm.workload import BucketPredictor, question_requests
from shoal.core import Request, SyntheticPrompt
from shoal.forecast import StepRows

QUICK = Effort(quick=True)


def column(result: Result, metric: str, key: str, **where) -> dict:
    """A metric by one configuration key, over the rows that match ``where``."""
    return {
        row.config[key]: row.metrics[metric]
        for row in result.rows
        if all(row.config[name] == value for name, value in where.items())
    }


def test_the_hf_engine_has_the_printed_times() -> None:
    serve = ENGINES["hf"].time.serve
    assert serve(16, 1024, 128) == pytest.approx(13.5, rel=0.01)
    assert serve(15, 10, 128) + serve(1, 1024, 128) == pytest.approx(7.6, rel=0.01)


def test_memory_is_that_of_the_fixed_batches() -> None:
    assert memory_of("hf").fits(16, 1024, 1024)
    assert not memory_of("hf").fits(17, 1024, 1024)
    assert memory_of("ds").fits(12, 1024, 1024)
    assert not memory_of("ds").fits(13, 1024, 1024)


def test_lengths_have_their_median_and_limits() -> None:
    lengths = Lognormal(median=100.0, sigma=1.0, maximum=300)
    assert [lengths.at(q) for q in (0.0, 0.5, 1.0)] == [1, 100, 300]
    assert lengths.at(0.8413447) == 272


def test_requests_arrive_at_their_rate_with_the_same_lengths() -> None:
    slow, fast = codefuse_requests(5.0, 400.0), codefuse_requests(20.0, 400.0)
    assert len(slow) == pytest.approx(2000, rel=0.1)
    assert len(fast) == pytest.approx(8000, rel=0.05)
    assert [len(one.prompt) for one in slow] == [len(one.prompt) for one in fast[: len(slow)]]
    assert codefuse_requests(5.0, 400.0) == slow != codefuse_requests(5.0, 400.0, seed=1)
    arrivals = [one.arrival_ns for one in fast]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 400e9
    short = sum(one.true_output_tokens <= 384 for one in fast) / len(fast)
    assert 0.85 < short < 0.92


def test_times_of_decode_runs_equal_single_steps() -> None:
    times = RaggedTimes(0.016, 1.45e-4, 1e-6)
    ahead = times.decode_times(3, 100, 50)
    assert [times.step_time(StepRows(3, 100 + 3 * n)) for n in range(50)] == list(ahead)
    assert times.step_time(StepRows(0, 0, ((10, 0), (5, 5)))) == pytest.approx(0.016 + 15 * 1.45e-4)


def test_the_bucket_predictor_returns_upper_ends_of_buckets() -> None:
    right, wrong = BucketPredictor(1.0), BucketPredictor(0.0)
    for request in question_requests(200):
        true = request.true_output_tokens
        believed = right.predict(request, 0, 512)
        assert true <= believed < true + 52.2
        assert 0 < abs(wrong.predict(request, 0, 512) - believed) < 105
        assert 1 <= wrong.predict(request, 0, 512) <= 512
    request = Request(id="r", service="s", prompt=SyntheticPrompt(1), true_output_tokens=100)
    assert [right.predict(request, done, 100) for done in (0, 1, 10, 19, 99)] == [100, 10, 20, 20, 100]


@pytest.mark.parametrize("engine", ENGINES)
def test_overloaded_scls_serves_more_in_larger_batches(engine) -> None:
    sls, scls = (
        run_static(static_preset(name, engine), engine, rate=15.0, seconds=60.0).report
        for name in ("sls", "scls")
    )
    assert scls.requests_per_s > 1.5 * sls.requests_per_s
    assert scls.response_mean_s < 0.5 * sls.response_mean_s
    assert scls.mean_batch_size > sls.mean_batch_size
    assert scls.tokens.invalid_tokens < sls.tokens.invalid_tokens
    assert scls.early_return_ratio < 0.01


@pytest.mark.slow
def test_each_step_of_the_ladder_serves_more() -> None:
    result = REPRODUCTIONS["scls-ablation"].run(QUICK)
    for engine in ENGINES:
        steps = column(result, "throughput", "step", engine=engine)
        assert list(steps) == ["sls", "so", "pm", "ab", "lb", "scls"]
        assert steps["sls"] < steps["so"] < steps["pm"] < min(steps["ab"], steps["lb"]) < steps["scls"]
        assert column(result, "throughput_over_sls", "step", engine=engine)["sls"] == 1


@pytest.mark.slow
def test_slices_are_neither_too_short_nor_too_long() -> None:
    result = REPRODUCTIONS["scls-slice-length"].run(QUICK)
    for engine in ENGINES:
        throughput = column(result, "throughput", "slice_tokens", engine=engine)
        assert max(throughput, key=throughput.get) in (64, 128, 256)
        for metric, rises in (("invalid_tokens", True), ("slices", False), ("pad_tokens", False)):
            values = list(column(result, metric, "slice_tokens", engine=engine).values())
            assert values == sorted(values, reverse=not rises), metric


def test_throughput_grows_with_the_workers() -> None:
    result = REPRODUCTIONS["scls-scalability"].run(QUICK)
    for engine in ENGINES:
        speedup = column(result, "speedup", "workers", engine=engine)
        assert speedup[1] == 1
        assert all(0.75 * workers < value <= 1.05 * workers for workers, value in speedup.items())


def test_batching_by_length_lowers_latency_and_by_slo_raises_attainment() -> None:
    result = REPRODUCTIONS["uellm-batching"].run(QUICK)
    latency = column(result, "mean_latency_s", "batcher", waiting=128, max_batch=16)
    kept = column(result, "slo_attainment", "batcher", waiting=128, max_batch=16)
    assert latency["odbs"] < 0.6 * latency["fifo"]
    assert kept["slo-dbs"] > kept["fifo"] + 0.1
    assert kept["slo-odbs"] > kept["fifo"]
    assert result.to_json() == REPRODUCTIONS["uellm-batching"].run(QUICK).to_json()
