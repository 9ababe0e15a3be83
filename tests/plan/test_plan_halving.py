"""Successive halving against rankings that are known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.core import ConfigError
from shoal.plan.halving import Round, plan_rounds, successive_halving


def test_a_third_goes_on_to_three_times_as_much():
    rounds = plan_rounds(27, least_share=0.01)
    assert [each.candidates for each in rounds] == [27, 9, 3, 1]
    assert [each.share for each in rounds] == pytest.approx([1 / 27, 1 / 9, 1 / 3, 1])


def test_no_round_looks_at_too_little():
    assert plan_rounds(27, least_share=0.2) == [Round(27, 1 / 3), Round(9, 1.0)]
    assert plan_rounds(27, least_share=0.5) == [Round(27, 1.0)]


def test_without_candidates_there_is_nothing_to_choose():
    with pytest.raises(ConfigError, match="nothing to choose"):
        plan_rounds(0, 0.1)


@settings(max_examples=examples(100))
@given(
    losses=st.lists(st.integers(0, 1000), min_size=1, max_size=60, unique=True),
    least_share=st.floats(0.001, 1),
    always=st.booleans(),
)
def test_where_every_share_ranks_rightly_the_best_wins(losses, least_share, always):
    rounds = plan_rounds(len(losses), least_share)
    asked = []

    def evaluate(candidates, share):
        asked.append((len(candidates), share))
        return [losses[each] / share for each in candidates]

    candidates = list(range(len(losses)))
    outcomes = list(successive_halving(candidates, rounds, evaluate, always=[0] if always else []))
    ranking = sorted(candidates, key=losses.__getitem__)
    for each, outcome in zip(rounds, outcomes, strict=True):
        # The best candidates go on; the one in ``always`` may be there in addition.
        expected = set(ranking[: each.candidates]) | ({0} if always else set())
        assert list(outcome.candidates) == [at for at in ranking if at in expected]
        assert list(outcome.losses) == sorted(outcome.losses)
    assert outcomes[-1].candidates[0] == ranking[0]
    assert [share for _, share in asked] == [each.share for each in rounds]
    assert asked[-1][1] == 1.0


def test_what_looks_bad_on_little_is_lost():
    """The method's risk: it is not an exhaustive search."""
    first = {0: 1.0, 1: 2.0, 2: 3.0}
    last = {0: 3.0, 1: 2.0, 2: 1.0}

    def evaluate(candidates, share):
        return [(last if share == 1 else first)[each] for each in candidates]

    outcomes = list(successive_halving([0, 1, 2], plan_rounds(3, 0.1), evaluate))
    assert outcomes[-1].candidates == [0]


def test_of_equal_candidates_the_earlier_is_better():
    [outcome] = successive_halving([3, 1, 2], [Round(3, 1.0)], lambda candidates, share: [0.0] * 3)
    assert outcome.candidates == [3, 1, 2]
