"""Curves of step time: sums by hand, fits of known truths, runs to the last bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import ConfigError
from shoal.forecast import (
    CurveTimes,
    FittedTimes,
    LatencyModel,
    LatencyProfile,
    PiecewiseCost,
    StepRows,
    fit_curve,
    load_profile,
    save_profile,
)

TRUTH = CurveTimes(
    constant_s=1.5e-2,
    tokens=PiecewiseCost((4, 16, 32, 64, 1024), (5e-4, 6e-3, 1e-2, 4e-2, 0.9)),
    decodes=PiecewiseCost((1, 4, 32), (4e-3, 1.2e-2, 4e-2)),
    chunk_s=3e-3,
    context_s=8e-6,
    work_s=5e-7,
)
LINEAR = LatencyModel(constant_s=2e-2, sequence_s=5e-4, token_s=1.5e-3, context_s=4e-6, work_s=6e-7)

chunks = st.lists(st.tuples(st.integers(2, 300), st.integers(0, 500)), max_size=3).map(tuple)
steps = st.builds(
    lambda decodes, attended, new: StepRows(decodes, decodes * attended, new, decodes + len(new)),
    st.integers(0, 60),
    st.integers(1, 1000),
    chunks,
)


def many_steps(seed: int, count: int = 600) -> list[StepRows]:
    """Decode batches, prefills and both."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        decodes = int(rng.integers(0, 33)) if number % 3 else 0
        new = tuple(
            (int(2 ** rng.uniform(1, 8)), int(rng.integers(0, 100)))
            for _ in range(0 if decodes and number % 2 else int(rng.integers(1, 4)))
        )
        context = sum(int(length) for length in rng.integers(5, 600, decodes))
        found.append(StepRows(decodes, context, new, decodes + len(new)))
    return found


def test_a_bend_is_linear_between_knots_and_goes_on_beyond():
    cost = PiecewiseCost((2, 6, 10), (1.0, 1.0, 3.0))
    assert [cost.at(n) for n in (0, 1, 2, 4, 6, 7, 10, 12)] == [0.0, 0.5, 1.0, 1.0, 1.0, 1.5, 3.0, 4.0]
    assert PiecewiseCost((), ()).at(7) == 0.0
    assert PiecewiseCost((8,), (2.0,)).at(16) == 4.0


@pytest.mark.parametrize(
    ("knots", "seconds", "problem"),
    [
        ((1, 2), (1.0,), "2 knots need as many seconds, got 1"),
        ((2, 2), (1.0, 2.0), "knots must rise"),
        ((0, 2), (1.0, 2.0), "begin above 0"),
        ((1, 2), (2.0, 1.0), "seconds must never fall"),
        ((1,), (float("nan"),), "finite number of at least 0"),
    ],
)
def test_what_is_no_bend_is_refused(knots, seconds, problem):
    with pytest.raises(ConfigError, match=problem):
        PiecewiseCost(knots, seconds)


def test_a_step_by_hand():
    rows = StepRows(4, 400, ((12, 0), (16, 100)), 6)
    work = 12 * 13 / 2 + 16 * 100 + 16 * 17 / 2
    expected = 1.5e-2 + 1e-2 + 1.2e-2 + 400 * 8e-6 + 2 * 3e-3 + work * 5e-7
    assert rows.new_tokens == 32
    assert TRUTH.step_time(rows) == pytest.approx(expected, rel=1e-12)


@given(steps, steps)
def test_a_larger_step_never_takes_less(one, other):
    both = StepRows(
        one.decodes + other.decodes,
        one.decode_context + other.decode_context,
        one.chunks + other.chunks,
        one.sampled + other.sampled,
    )
    assert TRUTH.step_time(both) >= TRUTH.step_time(one) > 0


@given(st.integers(1, 200), st.integers(0, 5000), st.integers(1, 40))
def test_decode_times_are_step_times_to_the_bit(sequences, beyond, count):
    context = sequences + beyond
    one_by_one = [
        TRUTH.step_time(StepRows(sequences, context + sequences * step, (), sequences))
        for step in range(count)
    ]
    assert TRUTH.decode_times(sequences, context, count).tolist() == one_by_one


def test_a_request_alone_takes_the_sum_of_its_steps():
    decodes = [TRUTH.step_time(StepRows(1, 50 + n, (), 1)) for n in range(1, 10)]
    alone = TRUTH.step_time(StepRows(0, 0, ((50, 0),), 1)) + sum(decodes)
    assert TRUTH.execution_time(50, 10) == pytest.approx(alone)
    assert TRUTH.execution_time(1, 1) == TRUTH.step_time(StepRows(1, 1, (), 1))


def test_a_known_curve_is_recovered_from_noisy_samples():
    rows = many_steps(1)
    noise = np.random.default_rng(2).normal(1.0, 0.02, len(rows))
    noise[::40] = 5.0
    times = [TRUTH.step_time(one) * float(factor) for one, factor in zip(rows, noise, strict=True)]
    curve, report = fit_curve(rows, times)
    assert report.dropped >= len(rows) // 40
    for one in many_steps(3, 200):
        assert curve.step_time(one) == pytest.approx(TRUTH.step_time(one), rel=0.05)
    errors = [curve.step_time(one) / TRUTH.step_time(one) - 1 for one in many_steps(4, 200)]
    assert abs(float(np.mean(errors))) < 0.01


def test_noise_does_not_make_the_curve_too_low():
    """A fit of errors relative to what was measured would find less, by the square of the noise: 2%."""
    rows = many_steps(6, 4000)
    noise = np.random.default_rng(7).normal(1.0, 0.15, len(rows))
    curve, _ = fit_curve(
        rows, [TRUTH.step_time(one) * float(factor) for one, factor in zip(rows, noise, strict=True)]
    )
    errors = [curve.step_time(one) / TRUTH.step_time(one) - 1 for one in rows]
    assert abs(float(np.mean(errors))) < 0.01


def test_a_linear_truth_is_one_of_the_curves():
    rows = many_steps(5)
    curve, report = fit_curve(rows, [FittedTimes(LINEAR).step_time(one) for one in rows])
    assert report.mean_absolute_percent_error < 0.01
    assert curve.context_s == pytest.approx(LINEAR.context_s, rel=1e-3)


def test_a_bent_truth_needs_the_curve():
    rows = [StepRows(n, 100 * n, (), n) for n in (1, 2, 4, 8, 16, 32, 64)]
    times = [TRUTH.step_time(one) for one in rows]
    curve, _ = fit_curve(rows, times)
    assert [curve.step_time(one) for one in rows] == pytest.approx(times, rel=1e-3)


def test_what_the_samples_never_vary_costs_nothing():
    curve, _ = fit_curve([StepRows(0, 0, ((n, 0),), 1) for n in (8, 30, 100)], [0.02, 0.04, 0.12])
    assert curve.decodes == PiecewiseCost((), ())
    assert curve.context_s == 0
    assert curve.tokens.knots == (8, 32, 100)


@pytest.mark.parametrize(("count", "seconds"), [(0, []), (1, [0.0]), (2, [1.0]), (1, [float("inf")])])
def test_a_fit_without_usable_samples_is_refused(count, seconds):
    with pytest.raises(ValueError, match=r"a fit needs|must be finite"):
        fit_curve([StepRows(1, 10, (), 1)] * count, seconds)


PROFILE = LatencyProfile(
    device="cpu",
    threads=2,
    models={("chat", 1): LINEAR, ("complete", 1): LINEAR},
    curves={("chat", 1): TRUTH},
)


def test_a_curve_survives_its_file_and_is_preferred(tmp_path):
    path = tmp_path / "latency.json"
    save_profile(PROFILE, path)
    read = load_profile(path)
    assert read == PROFILE
    assert read.times("chat") == TRUTH
    assert read.times("complete") == FittedTimes(LINEAR)
    with pytest.raises(ConfigError, match="no latency profile of other"):
        read.times("other")


def test_a_file_without_curves_is_read_as_before(tmp_path):
    path = tmp_path / "latency.json"
    save_profile(replace(PROFILE, curves={}), path)
    assert "curve" not in path.read_text()
    assert load_profile(path).times("chat") == FittedTimes(LINEAR)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ([], 3, "curve: expected an object"),
        (["chunk_s"], -1, "curve.chunk_s: expected a number of at least 0"),
        (["chunks"], 1, "curve.chunks: unknown key; possible here: constant_s, tokens"),
        (["tokens"], None, "curve.tokens: expected an object"),
        (["tokens", "knots"], 4, "curve.tokens.knots: expected a list"),
        (["tokens", "knots"], [1, 2.5], r"curve.tokens.knots\[1\]: expected a number"),
        (["decodes", "seconds"], [1.0, 0.5, 2.0], "curve.decodes: seconds must never fall"),
        (["decodes", "seconds"], ["a"], r"curve.decodes.seconds\[0\]: expected a number"),
    ],
)
def test_a_damaged_curve_is_refused_by_key(path, value, expected, tmp_path):
    plain = json.loads(json.dumps(PROFILE.to_json()))
    place = plain["services"][0]
    for key in ["curve", *path][:-1]:
        place = place[key]
    place[["curve", *path][-1]] = value
    file = tmp_path / "latency.json"
    file.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=r"services\[0\]\." + expected):
        load_profile(file)
