import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import ConfigError, Request
from shoal.forecast import PREDICTORS, LengthHistory, make_predictor

MAXIMUM = 400
lengths = st.integers(1, MAXIMUM)


def make_request(*, prompt=(1, 2, 3), true=None):
    return Request(id="r", service="chat", prompt=list(prompt), true_output_tokens=true)


def history_of(past, *, window=1000):
    history = LengthHistory(MAXIMUM, window)
    for length in past:
        history.record(length)
    return history


def mean_by_hand(past, generated, max_new_tokens):
    longer = [min(length, max_new_tokens) for length in past if length > generated]
    if not longer:
        return min(2 * generated, max_new_tokens) if past else max_new_tokens
    return -(-sum(longer) // len(longer))


@pytest.mark.parametrize("name", sorted(PREDICTORS))
@given(
    past=st.lists(lengths, max_size=20),
    prompt=st.lists(st.integers(0, 50_000), min_size=1, max_size=20),
    true=st.none() | lengths,
    bounds=st.tuples(st.integers(0, 2 * MAXIMUM), st.integers(1, 2 * MAXIMUM)),
)
def test_every_prediction_is_more_than_generated_and_at_most_max_new_tokens(name, past, prompt, true, bounds):
    generated, max_new_tokens = bounds[0], bounds[0] + bounds[1]
    history = history_of(past)
    predictor = make_predictor(name, MAXIMUM, history)
    for number, length in enumerate(past):
        predictor.record(make_request(prompt=(number, *prompt)), length)
    for request in (make_request(prompt=prompt, true=true), make_request(true=true)):
        predicted = predictor.predict(request, generated, max_new_tokens)
        assert type(predicted) is int
        assert generated < predicted <= max_new_tokens


def test_maximum_predicts_max_new_tokens():
    predictor = make_predictor("maximum", MAXIMUM, history_of([3, 3, 3]))
    assert predictor.predict(make_request(true=3), 0, 77) == 77


@given(
    st.lists(lengths, max_size=30),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 390), st.integers(1, 400)), max_size=4),
)
def test_history_is_the_rounded_up_mean_of_recent_longer_lengths(past, window, asked):
    history = LengthHistory(MAXIMUM, window)
    predictor = make_predictor("history", MAXIMUM, history)
    recorded = []
    for length in past:
        history.record(length)
        recorded.append(length)
        for generated, more in asked * 2:
            predicted = predictor.predict(make_request(), generated, generated + more)
            assert predicted == mean_by_hand(recorded[-window:], generated, generated + more)


def test_history_leaves_recording_to_the_owner():
    history = history_of([10])
    predictor = make_predictor("history", MAXIMUM, history)
    predictor.record(make_request(), 300)
    assert predictor.predict(make_request(), 0, MAXIMUM) == 10
    history.record(300)
    assert predictor.predict(make_request(), 0, MAXIMUM) == math.ceil((10 + 300) / 2)


def test_the_oracle_predicts_the_true_length():
    oracle = make_predictor("oracle", MAXIMUM, history_of([]))
    assert oracle.predict(make_request(true=50), 0, 100) == 50
    assert oracle.predict(make_request(true=50), 49, 100) == 50
    assert oracle.predict(make_request(true=50), 0, 30) == 30
    assert oracle.predict(make_request(true=50), 50, 100) == 100
    assert oracle.predict(make_request(), 0, 100) == 100


def test_an_unknown_name_is_answered_with_the_possible_ones():
    with pytest.raises(ConfigError, match=r"'histroy' is not known; did you mean 'history'.*maximum, oracle"):
        make_predictor("histroy", MAXIMUM, history_of([]))
