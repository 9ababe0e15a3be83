"""Arrival processes against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shoal.core import ConfigError
from shoal.workload import (
    ARRIVALS,
    ArrivalProcess,
    AtOnce,
    Gamma,
    Poisson,
    Replay,
    Uniform,
    Weibull,
    weibull_shape,
)

RANDOM = [Poisson(2.0), Gamma(5.0, 0.4), Gamma(0.5, 3.0), Weibull(5.0, 0.4), Weibull(0.5, 2.0)]


def gaps_s(process: ArrivalProcess, count: int = 40_000, seed: int = 1) -> np.ndarray:
    return np.diff([0, *process.times_ns(count, seed)]) / 1e9


@pytest.mark.parametrize("process", RANDOM)
def test_rate_and_variation_are_as_given(process: Poisson | Gamma | Weibull) -> None:
    gaps = gaps_s(process)
    assert 1 / gaps.mean() == pytest.approx(process.rate, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(getattr(process, "cv", 1.0), rel=0.06)


@pytest.mark.parametrize(
    ("process", "law"),
    [
        (Poisson(2.0), stats.expon(scale=0.5)),
        (Gamma(2.0, 1.0), stats.expon(scale=0.5)),
        (Weibull(2.0, 1.0), stats.expon(scale=0.5)),
        (Gamma(4.0, 2.0), stats.gamma(0.25, scale=1.0)),
        (Weibull(1.0, 5**0.5), stats.weibull_min(0.5, scale=0.5)),
    ],
)
def test_times_between_requests_follow_their_law(process: ArrivalProcess, law: stats.rv_continuous) -> None:
    assert stats.kstest(gaps_s(process, 5000), law.cdf).pvalue > 0.01


def test_the_law_test_can_fail() -> None:
    assert stats.kstest(gaps_s(Gamma(2.0, 1.2), 5000), stats.expon(scale=0.5).cdf).pvalue < 1e-6


@given(st.floats(0.01, 100))
def test_weibull_shape_gives_the_variation_back(cv: float) -> None:
    mean, variance = stats.weibull_min.stats(weibull_shape(cv), moments="mv")
    assert variance**0.5 / mean == pytest.approx(cv, rel=1e-4)


@pytest.mark.parametrize("process", [*RANDOM, Uniform(3.0), AtOnce(), Replay(times=tuple(range(0, 900, 3)))])
def test_times_are_sorted_and_depend_only_on_the_seed(process: ArrivalProcess) -> None:
    times = process.times_ns(300, 7)
    assert times == sorted(times)
    assert min(times) >= 0
    assert all(type(time) is int for time in times)
    assert process.times_ns(300, 7) == times
    assert process.times_ns(120, 7) == times[:120]
    assert process.times_ns(0, 7) == []
    if process in RANDOM:
        assert process.times_ns(300, 8) != times


def test_uniform_is_even_and_does_not_drift() -> None:
    assert Uniform(4.0).times_ns(3, 0) == [0, 250_000_000, 500_000_000]
    assert Uniform(3.0).times_ns(3_000_001, 0)[-1] == 10**6 * 10**9


def test_at_once() -> None:
    assert AtOnce().times_ns(3, 0) == [0, 0, 0]


def test_replay_stretches_and_squeezes() -> None:
    times = (100, 300, 1100)
    assert Replay(times=times).times_ns(3, 0) == [0, 200, 1000]
    assert Replay(2.5, times=times).times_ns(3, 0) == [0, 500, 2500]


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=20), st.floats(0.01, 1000))
def test_replay_has_the_given_rate(times: list[int], rate: float) -> None:
    times = sorted(times)
    replay = Replay(rate=rate, times=times)
    if times[0] == times[-1]:
        with pytest.raises(ConfigError, match="no scale gives them a rate"):
            replay.times_ns(len(times), 0)
        return
    last = replay.times_ns(len(times), 0)[-1]
    assert (len(times) - 1) / rate == pytest.approx(last / 1e9, rel=1e-6)


def test_replay_has_no_more_requests_than_the_trace() -> None:
    with pytest.raises(ConfigError, match="3 arrivals asked of a replay of 2"):
        Replay(times=(0, 1)).times_ns(3, 0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["poisson", "uniform", "replay"])
def test_rates_must_be_positive(name: str, rate: float) -> None:
    with pytest.raises(ConfigError, match="rate must be"):
        ARRIVALS[name](rate=rate)  # type: ignore[call-arg]


@pytest.mark.parametrize("cv", [0.0, -1.0, float("nan"), 1e6])
@pytest.mark.parametrize("kind", [Gamma, Weibull])
def test_variation_must_be_sensible(kind: type[Gamma | Weibull], cv: float) -> None:
    with pytest.raises(ConfigError, match="cv must be"):
        kind(1.0, cv)


def test_replay_takes_scale_or_rate() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Replay(time_scale=2.0, rate=3.0)
    with pytest.raises(ConfigError, match="time_scale must be"):
        Replay(time_scale=0.0)
