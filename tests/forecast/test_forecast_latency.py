"""Latency models: shapes counted position by position, sums taken step by step, fits of known truths."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.core import ConfigError
from shoal.forecast import (
    Bilinear,
    LatencyModel,
    LatencyProfile,
    PaddedLatency,
    PaddedSample,
    StepShape,
    fit_latency,
    fit_padded,
    load_profile,
    save_profile,
)

TRUTH = LatencyModel(constant_s=2e-2, sequence_s=5e-4, token_s=1.5e-3, context_s=4e-6, work_s=6e-7)
PADDED = PaddedLatency(
    prefill=Bilinear(product=1.5e-3, sequence=2e-3, length=1e-5, constant=3e-2),
    decode=Bilinear(product=5e-6, sequence=2e-3, length=3e-6, constant=2e-2),
)

rows = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=8)


@given(rows)
def test_a_shape_counts_every_position_that_a_token_attends(rows):
    decode = sum(1 for q, c in rows if q == 1 for _ in range(c + 1))
    prefill = sum(1 for q, c in rows if q > 1 for t in range(q) for _ in range(c + t + 1))
    assert StepShape.of(rows) == StepShape(len(rows), sum(q for q, _ in rows), decode, prefill)


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 50))
def test_equal_rows_are_the_shape_of_those_rows(sequences, new, context):
    assert StepShape.equal_rows(sequences, new, context) == StepShape.of([(new, context)] * sequences)


def test_a_mixed_step_by_hand():
    shape = StepShape.of([(1, 9), (1, 4), (3, 2)])
    assert shape == StepShape(sequences=3, new_tokens=5, decode_context=15, prefill_work=3 + 4 + 5)
    assert TRUTH.step_time(shape) == pytest.approx(2e-2 + 3 * 5e-4 + 5 * 1.5e-3 + 15 * 4e-6 + 12 * 6e-7)


@given(st.lists(rows, min_size=1, max_size=5))
def test_many_steps_at_once_take_what_each_takes(steps):
    shapes = [StepShape.of(one) for one in steps]
    columns = [np.array([getattr(s, name) for s in shapes]) for name in StepShape.__slots__]
    assert TRUTH.step_times(*columns) == pytest.approx([TRUTH.step_time(s) for s in shapes])


def test_arrays_and_numbers_broadcast():
    times = TRUTH.step_times(4, 4, np.array([100, 104]), 0)
    assert times == pytest.approx([TRUTH.step_time(StepShape(4, 4, c, 0)) for c in (100, 104)])


def stepwise(step, sequences, prompt, output):
    """One prefill that samples the first tokens, then a decode step for each further one."""
    total = step(StepShape.of([(prompt, 0)] * sequences))
    for done in range(1, output):
        total += step(StepShape.of([(1, prompt + done - 1)] * sequences))
    return total


@given(st.integers(1, 9), st.integers(1, 90), st.integers(1, 140))
def test_a_slice_is_the_sum_of_its_steps(sequences, prompt, output):
    expected = stepwise(TRUTH.step_time, sequences, prompt, output)
    assert TRUTH.slice_time(sequences, prompt, output) == pytest.approx(expected)


@given(st.integers(1, 300), st.integers(1, 200))
def test_execution_is_one_request_alone(prompt, output):
    assert TRUTH.execution_time(prompt, output) == pytest.approx(stepwise(TRUTH.step_time, 1, prompt, output))


@given(st.integers(1, 16), st.integers(1, 500), st.integers(1, 140))
def test_serving_is_a_prefill_and_the_sum_over_decode_iterations(sequences, length, tokens):
    p, d = PADDED.prefill, PADDED.decode
    expected = p.product * sequences * length + p.sequence * sequences + p.length * length + p.constant
    for l in range(length + 1, length + tokens):  # noqa: E741
        expected += d.product * sequences * l + d.sequence * sequences + d.length * l + d.constant
    assert PADDED.serve(float(sequences), length, tokens) == pytest.approx(expected)


def test_serving_takes_an_array_of_batch_sizes():
    sizes = np.array([1.0, 3.0, 7.0])
    assert PADDED.serve(sizes, 50, 128) == pytest.approx([PADDED.serve(float(n), 50, 128) for n in sizes])


def grid_shapes():
    prefills = [StepShape.equal_rows(n, length, 0) for n in (1, 2, 4, 8) for length in (16, 64, 200, 512)]
    decodes = [StepShape.equal_rows(n, 1, c) for n in (1, 2, 4, 8, 16) for c in (16, 128, 512, 1024)]
    mixed = [StepShape.of([(1, c)] * n + [(q, 0)]) for n in (2, 8) for c in (50, 300) for q in (32, 256)]
    return prefills + decodes + mixed


def noisy(rng, seconds, spread):
    return [s * rng.uniform(1 - spread, 1 + spread) for s in seconds]


@pytest.mark.parametrize("seed", range(5))
def test_a_fit_finds_the_truth_behind_noise_and_disturbed_steps(seed):
    rng = np.random.default_rng(seed)
    shapes = grid_shapes()
    seconds = noisy(rng, [TRUTH.step_time(s) for s in shapes], 0.02)
    for disturbed in rng.choice(len(shapes), 3, replace=False):
        seconds[disturbed] *= 8
    model, report = fit_latency(shapes, seconds)
    for shape in shapes:
        assert model.step_time(shape) == pytest.approx(TRUTH.step_time(shape), rel=0.06)
    assert model.slice_time(4, 96, 128) == pytest.approx(TRUTH.slice_time(4, 96, 128), rel=0.03)
    assert report.samples == len(shapes)
    assert 3 <= report.dropped <= len(shapes) // 10


def test_the_report_is_about_all_samples():
    shapes = grid_shapes()
    seconds = [TRUTH.step_time(s) for s in shapes]
    model, report = fit_latency(shapes, seconds)
    assert asdict(model) == pytest.approx(asdict(TRUTH))
    assert report.rmse_s == pytest.approx(0, abs=1e-9)
    seconds[7] *= 10
    model, report = fit_latency(shapes, seconds)
    assert asdict(model) == pytest.approx(asdict(TRUTH))
    assert report.rmse_s == pytest.approx(0.9 * seconds[7] / len(shapes) ** 0.5)
    assert report.mean_absolute_percent_error == pytest.approx(90 / len(shapes))
    assert report.dropped >= 1


def test_short_steps_count_as_much_as_long_ones():
    """A long prefill that is not linear must not spoil the decode steps."""
    shapes = [StepShape.equal_rows(1, 1, c) for c in range(0, 400, 10)] + [StepShape.equal_rows(8, 512, 0)]
    seconds = [0.03 + 1e-5 * shape.decode_context for shape in shapes[:-1]] + [40.0]
    model, _ = fit_latency(shapes, seconds)
    assert model.step_time(shapes[0]) == pytest.approx(seconds[0], rel=0.01)
    assert model.step_time(shapes[-2]) == pytest.approx(seconds[-2], rel=0.01)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(rows, st.floats(1e-4, 10.0)), min_size=1, max_size=30), rows)
def test_no_fit_ever_predicts_a_negative_time(samples, other):
    model, _ = fit_latency([StepShape.of(one) for one, _ in samples], [seconds for _, seconds in samples])
    assert model.step_time(StepShape.of(other)) >= 0
    assert all(cost >= 0 for cost in asdict(model).values())


def test_the_padded_fit_finds_its_coefficients():
    prefill = [
        PaddedSample(n, length, PADDED.prefill.time(float(n), length))
        for n in (1, 2, 4, 8)
        for length in (16, 128, 512)
    ]
    decode = [
        PaddedSample(n, length, PADDED.decode.time(float(n), length))
        for n in (1, 2, 4, 8)
        for length in (16, 128, 512)
    ]
    fitted, prefill_report, decode_report = fit_padded(prefill, decode)
    assert asdict(fitted)["prefill"] == pytest.approx(asdict(PADDED.prefill))
    assert asdict(fitted)["decode"] == pytest.approx(asdict(PADDED.decode))
    assert prefill_report.samples == decode_report.samples == 12
    assert prefill_report.mean_absolute_percent_error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("shapes", "seconds"),
    [(0, []), (2, [0.1]), (2, [0.1, 0.0]), (2, [0.1, -1.0]), (2, [0.1, float("nan")])],
)
def test_samples_that_cannot_be_fitted_are_refused(shapes, seconds):
    with pytest.raises(ValueError, match=r"a fit needs|must be finite"):
        fit_latency([StepShape.of([(1, 5)])] * shapes, seconds)


@pytest.mark.parametrize("cost", [-1e-9, float("nan"), float("inf")])
def test_costs_without_meaning_are_refused(cost):
    with pytest.raises(ConfigError, match="context_s must be a finite number of at least 0"):
        replace(TRUTH, context_s=cost)
    with pytest.raises(ConfigError, match="length must be"):
        replace(PADDED.decode, length=cost)


PROFILE = LatencyProfile(
    device="cuda:0",
    threads=3,
    models={("chat", 1): TRUTH, ("chat", 2): replace(TRUTH, constant_s=1e-2), ("complete", 1): TRUTH},
    padded={("chat", 1): PADDED},
)


def test_a_profile_survives_its_file(tmp_path):
    path = tmp_path / "latency.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    assert json.loads(path.read_text())["version"] == 1
    assert load_profile(path).model("chat", 2).constant_s == 1e-2
    assert load_profile(path).padded_form("chat") == PADDED


def test_missing_parts_of_a_profile_are_reported():
    with pytest.raises(
        ConfigError, match=r"no latency profile of other .* there is: chat \(tensor parallel 1\)"
    ):
        PROFILE.model("other")
    with pytest.raises(ConfigError, match="complete with tensor parallel 1; there is: chat"):
        PROFILE.padded_form("complete")


def changed(path, value):
    """The profile's JSON with one place changed; None deletes it."""
    plain = json.loads(json.dumps(PROFILE.to_json()))
    *inner, last = path
    place = plain
    for key in inner:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return plain


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["format"], "other", "format: not a latency profile"),
        (["version"], 2, "version: expected 1, got 2"),
        (["device"], 7, "device: expected a device"),
        (["threads"], 0, "threads: expected a number of at least 1, got 0"),
        (["services"], {}, "services: expected a list"),
        (["services", 0], 3, r"services\[0\]: expected an object"),
        (["services", 0, "name"], "", r"services\[0\].name: expected a service's name"),
        (["services", 1, "tensor_parallel"], "2", r"services\[1\].tensor_parallel: expected a number"),
        (
            ["services", 1, "tensor_parallel"],
            1,
            r"services\[1\]: chat with tensor_parallel 1 is there already",
        ),
        (["services", 2, "step"], None, r"services\[2\].step: expected an object"),
        (["services", 2, "step", "work_s"], None, r"services\[2\].step.work_s: expected a number"),
        (
            ["services", 2, "step", "work_s"],
            -1.0,
            r"services\[2\].step.work_s: expected a number of at least 0",
        ),
        (
            ["services", 2, "step", "works"],
            1.0,
            r"services\[2\].step.works: unknown key; possible here: constant_s",
        ),
        (
            ["services", 0, "padded", "decode", "length"],
            True,
            r"services\[0\].padded.decode.length: expected",
        ),
        (["services", 0, "padded", "prefill"], None, r"services\[0\].padded.prefill: expected an object"),
    ],
)
def test_a_damaged_profile_is_refused_by_file_and_key(path, value, expected, tmp_path):
    file = tmp_path / "latency.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(ConfigError, match=r"latency\.json: " + expected):
        load_profile(file)


def test_a_file_that_is_none_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json.*shoal profile MODEL --out"):
        load_profile(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json: not valid JSON"):
        load_profile(broken)
    with pytest.raises(ConfigError, match="cannot write the latency profile"):
        save_profile(PROFILE, tmp_path / "no" / "where.json")
