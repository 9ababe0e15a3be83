"""What is decided at the end of an interval: whether to change, how long the next one is."""

import pytest

from shoal.cluster.placing.controller import PlacementController
from shoal.place.estimate import Estimate, ServiceEstimate
from shoal.place.re_placement import Hysteresis, IntervalRule


def estimate(met: float, latency: float = 2.0) -> Estimate:
    return Estimate({"a": ServiceEstimate(100, 100 * (1 - met), 100, 100 * latency)})


def controller(hysteresis: Hysteresis | None = None) -> PlacementController:
    return PlacementController(IntervalRule(first_s=60, least_s=20, most_s=600, beta=0.1), hysteresis)


def test_a_change_needs_a_gain():
    decided = controller(Hysteresis()).decide(estimate(0.8), estimate(0.8), estimate(0.9))
    assert decided.changes
    assert decided.why == "goals met 80.0% -> 90.0%, normalised latency 2.00 -> 2.00"
    decided = controller(Hysteresis()).decide(estimate(0.8), estimate(0.8), estimate(0.81))
    assert not decided.changes
    assert decided.why.startswith("too little gain: ")
    assert controller(None).decide(estimate(0.8), estimate(0.8), estimate(0.81)).changes


def test_a_gain_of_one_request_of_a_few_is_luck():
    few = [Estimate({"a": ServiceEstimate(25, missed, 25, 50.0)}) for missed in (5, 4, 2)]
    control = controller(Hysteresis(requests=3))
    assert not control.decide(few[0], few[0], few[1]).changes
    assert control.decide(few[0], few[0], few[2]).changes


def test_the_present_placement_is_no_change():
    decided = controller(None).decide(estimate(0.8), estimate(0.8), estimate(0.8), differs=False)
    assert not decided.changes
    assert decided.why == "the present placement is best"


def test_intervals_follow_the_accuracy_of_estimates():
    control = controller(Hysteresis())
    # The first interval was not estimated.
    assert control.decide(estimate(0.5), estimate(0.8), estimate(0.8)).interval_s == 60
    # It was estimated for the placement that stayed: 0.8, and so it came.
    decided = control.decide(estimate(0.8), estimate(0.7), estimate(0.9))
    assert decided.estimated == estimate(0.8)
    assert decided.interval_s == pytest.approx(66)
    # After the change the estimate is that of the new one.
    decided = control.decide(estimate(0.7), estimate(0.9), estimate(0.9))
    assert decided.estimated == estimate(0.9)
    assert decided.interval_s == pytest.approx(66 * 0.9)


def test_an_interval_without_a_search_keeps_its_length_and_estimate():
    control = controller(Hysteresis())
    control.decide(estimate(0.8), estimate(0.8), estimate(0.8))
    skipped = control.skip("too few requests")
    assert (skipped.changes, skipped.why, skipped.interval_s) == (False, "too few requests", 60)
    assert control.decide(estimate(0.8), estimate(0.8), estimate(0.8)).estimated == estimate(0.8)
