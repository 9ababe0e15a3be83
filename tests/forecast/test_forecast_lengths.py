import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shoal.core import ConfigError, derive_seed, uniform
from shoal.forecast import LengthHistory, derive_seeds, uniforms
from shoal.forecast.lengths import FinishedLengths, LengthDistribution, kaplan_meier

NO_RUNNING = np.zeros(0, dtype=np.int64)


def history_of(lengths, *, maximum=10_000, cold_start="kaplan-meier", window=None):
    history = LengthHistory(maximum, window or max(1, len(lengths)), cold_start)
    for length in lengths:
        history.record(int(length))
    return history


def seeds_of(count):
    return np.array([derive_seed(7, number) for number in range(count)], dtype=np.uint64)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_vectorised_draws_are_those_of_core(seed, counters):
    state = derive_seed(seed, counters[0])
    seeds = derive_seeds(np.array([state], dtype=np.uint64), np.array(counters))
    assert seeds.tolist() == [derive_seed(seed, counters[0], counter) for counter in counters]
    assert uniforms(seeds).tolist() == [uniform(seed, counters[0], counter) for counter in counters]


@given(st.lists(st.integers(1, 30)))
def test_lengths_are_counted_as_by_hand(finished):
    counted = FinishedLengths.of(np.array(sorted(finished), dtype=np.int64))
    distinct = sorted(set(finished))
    assert counted.lengths.tolist() == distinct
    assert counted.events.tolist() == [finished.count(length) for length in distinct]
    assert counted.remaining.tolist() == [sum(other >= length for other in finished) for length in distinct]


def test_a_prediction_is_a_past_length_beyond_what_is_generated():
    distribution = history_of([3, 5, 5, 9, 20]).distribution(NO_RUNNING)
    generated = np.array([0, 4, 5, 9])
    drawn = distribution.draw(seeds_of(4), generated, np.full(4, 1_000), 500)
    assert [set(column.tolist()) for column in drawn.T] == [{3, 5, 9, 20}, {5, 9, 20}, {9, 20}, {20}]


def test_without_a_longer_past_length_a_request_is_predicted_to_reach_its_own_maximum():
    distribution = history_of([3, 5, 9]).distribution(NO_RUNNING)
    drawn = distribution.draw(seeds_of(2), np.array([9, 50]), np.array([77, 88]), 3)
    assert drawn.tolist() == [[77, 88]] * 3


def test_predictions_are_capped_at_max_new_tokens():
    distribution = history_of([3, 500]).distribution(NO_RUNNING)
    assert set(distribution.draw(seeds_of(1), np.array([0]), np.array([40]), 200).flat) == {3, 40}


def test_conditional_draws_follow_the_truncated_sample():
    lengths = np.random.default_rng(1).geometric(0.01, 1000)
    distribution = history_of(lengths).distribution(NO_RUNNING)
    for generated in (0, 60, 200):
        drawn = distribution.draw(seeds_of(1), np.array([generated]), np.array([10**6]), 4_000)[:, 0]
        beyond = lengths[lengths > generated]
        assert stats.ks_2samp(drawn, beyond).pvalue > 0.01
        assert stats.ks_2samp(drawn, beyond + 15).pvalue < 0.01


def test_a_draw_depends_on_request_progress_and_sample_only():
    distribution = history_of(range(1, 400)).distribution(NO_RUNNING)
    seeds, caps = seeds_of(6), np.full(6, 1_000)
    generated = np.arange(6) * 10
    drawn = distribution.draw(seeds, generated, caps, 10)
    alone = distribution.draw(seeds[3:4], generated[3:4], caps[3:4], 4)
    assert alone[:, 0].tolist() == drawn[:4, 3].tolist()
    later = distribution.draw(seeds, generated + 1, caps, 10)
    assert (later != drawn).mean() > 0.9


def test_only_the_window_counts():
    history = history_of([100] * 5 + [7] * 10, window=10)
    drawn = history.distribution(NO_RUNNING).draw(seeds_of(1), np.array([0]), np.array([1_000]), 100)
    assert set(drawn.flat) == {7}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 20))
def test_the_window_holds_the_last_lengths(lengths, window):
    history = LengthHistory(99, window)
    for length in lengths:
        history.record(length)
    distribution = history.distribution(NO_RUNNING)
    recent = lengths[-window:]
    for tokens in range(31):
        below = distribution.cumulative[distribution.lengths <= tokens]
        share = sum(length <= tokens for length in recent) / len(recent)
        assert (below[-1] if len(below) else 0) == pytest.approx(share)


def test_a_window_that_starts_full_predicts_the_maximum_at_first():
    history = LengthHistory(500, window=4, cold_start="max")
    caps, start = np.array([10_000]), np.array([0])
    assert history.distribution(NO_RUNNING).mean_beyond(start, caps).tolist() == [500]
    history.record(100)
    assert history.distribution(NO_RUNNING).mean_beyond(start, caps).tolist() == [400]
    for _ in range(3):
        history.record(100)
    assert history.distribution(NO_RUNNING).mean_beyond(start, caps).tolist() == [100]


def test_kaplan_meier_of_the_leukaemia_patients():
    # Remission times under 6-mercaptopurine (Freireich et al. 1963), the usual example of textbooks.
    events = np.array([6, 6, 6, 7, 10, 13, 16, 22, 23])
    censored = np.array([6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35])
    distribution = kaplan_meier(FinishedLengths.of(events), censored)
    assert distribution.lengths.tolist() == [6, 7, 10, 13, 16, 22, 23]
    survival = 1 - distribution.cumulative
    assert survival == pytest.approx([0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4)


def test_kaplan_meier_leaves_the_rest_at_the_maximum():
    history = history_of([4, 8], window=10)
    distribution = history.distribution(np.array([8, 8]))
    # 4 at risk at length 4, 3 at length 8: survival 3/4, then 1/2.
    assert distribution.cumulative == pytest.approx([0.25, 0.5])
    drawn = distribution.draw(seeds_of(1), np.array([4]), np.array([64]), 3_000)
    assert set(drawn.flat) == {8, 64}
    assert (drawn == 64).mean() == pytest.approx(2 / 3, abs=0.03)


def test_kaplan_meier_before_anything_finished():
    distribution = LengthHistory(100).distribution(np.array([3, 9]))
    assert distribution.draw(seeds_of(2), np.array([3, 9]), np.array([20, 30]), 2).tolist() == [[20, 30]] * 2
    assert distribution.mean_beyond(np.array([3, 9]), np.array([20, 30])).tolist() == [20, 30]


def test_kaplan_meier_removes_the_bias_of_what_finishes_first():
    """Of 200 lengths that began together, 60 steps later: short ones ended, long ones have 60 tokens."""
    lengths = np.random.default_rng(3).integers(1, 200, 200)
    ended = np.sort(lengths[lengths <= 60])
    distribution = kaplan_meier(FinishedLengths.of(ended), np.full((lengths > 60).sum(), 60))
    for tokens in (10, 30, 60):
        mass = distribution.cumulative[distribution.lengths <= tokens][-1]
        assert mass == pytest.approx((lengths <= tokens).mean())


def test_a_full_window_takes_no_notice_of_running_requests():
    history = history_of([4, 8])
    assert not history.censors
    assert history.distribution(np.array([100, 100])).cumulative.tolist() == [0.5, 1.0]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.lists(st.integers(0, 60), max_size=20),
    st.integers(0, 60),
    st.integers(1, 40),
)
def test_the_mean_is_that_of_the_draws_distribution(finished, running, generated, further):
    distribution = kaplan_meier(FinishedLengths.of(np.sort(finished)), np.array(running, dtype=np.int64))
    cap = generated + further
    mass = dict.fromkeys(distribution.lengths.tolist(), 0.0)
    previous = 0.0
    for length, cumulative in zip(distribution.lengths.tolist(), distribution.cumulative, strict=True):
        mass[length] = cumulative - previous
        previous = cumulative
    mass[10**9] = 1 - previous
    beyond = {length: share for length, share in mass.items() if length > generated and share > 1e-12}
    total = sum(beyond.values())
    expected = sum(share * min(length, cap) for length, share in beyond.items()) / total if total else cap
    mean = distribution.mean_beyond(np.array([generated]), np.array([cap]))
    assert mean[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [({"window": 0}, "window"), ({"cold_start": "warm"}, "kaplan-meier, max")],
)
def test_nonsense_is_refused(arguments, names):
    with pytest.raises(ConfigError, match=names):
        LengthHistory(10, **arguments)


def test_an_empty_output_cannot_be_recorded():
    with pytest.raises(ValueError, match="at least 1"):
        LengthHistory(10).record(0)


@given(st.integers(1, 400), st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50))
def test_equal_masses_are_found_where_a_search_finds_them(size, targets):
    cumulative = np.arange(1, size + 1) / size
    lengths = np.arange(1, size + 1)
    at_steps = np.concatenate((targets, cumulative[:-1], np.nextafter(cumulative, 0), [0.0, 1.0]))
    at_steps = np.tile(at_steps, 1 + 1024 // len(at_steps))  # few are searched for
    masses = np.arange(size + 1) / size
    found = LengthDistribution(lengths, masses, equal_masses=True)._indices(at_steps)
    assert found.tolist() == cumulative.searchsorted(at_steps, side="right").tolist()
