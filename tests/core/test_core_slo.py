"""Which goals count, and when they are met."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import (
    SLO,
    InvalidRequest,
    RequestRecord,
    attainment,
    has_goal,
    met,
    normalised_latency,
    resolve_slo,
    slo_problem,
)

SCALE = {"e2e_scale": 5.0}


def make_record(
    ttft: float = 0.5, e2e: float = 2.5, tokens: int = 5, largest_gap: float = 0.75
) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        service="s",
        arrival_ns=10**9,
        first_token_ns=10**9 + round(ttft * 1e9),
        finish_ns=10**9 + round(e2e * 1e9),
        prompt_tokens=7,
        output_tokens=tokens,
        largest_gap_ns=round(largest_gap * 1e9),
    )


@pytest.mark.parametrize(
    ("own", "service", "resolved"),
    [
        ({}, {}, {}),
        ({}, {"ttft_s": 1}, {"ttft_s": 1}),
        ({"ttft_s": 2}, {"ttft_s": 1, "tpot_s": 0.1}, {"ttft_s": 2, "tpot_s": 0.1}),
        ({}, SCALE, {"e2e_s": 10}),
        ({}, SCALE | {"e2e_s": 7}, {"e2e_s": 7}),
        ({}, SCALE | {"e2e_s": 12}, {"e2e_s": 10}),
        ({"e2e_s": 30}, SCALE | {"e2e_s": 7}, {"e2e_s": 30}),
        ({"e2e_scale": 8}, SCALE | {"e2e_s": 7}, {"e2e_s": 16}),
        ({"e2e_scale": 1, "e2e_s": 5}, {"ttft_s": 1}, {"ttft_s": 1, "e2e_s": 2}),
        ({"tpot_s": 0.2}, SCALE, {"tpot_s": 0.2, "e2e_s": 10}),
        ({"mtpot_s": 2}, {"mtpot_s": 1}, {"mtpot_s": 2}),
        ({"ttft_s": 2}, {"mtpot_s": 1}, {"ttft_s": 2, "mtpot_s": 1}),
    ],
)
def test_goals_of_the_request_override_those_of_the_service(
    own: dict[str, Any], service: dict[str, Any], resolved: dict[str, Any]
) -> None:
    """With an execution time of 2 s."""
    assert resolve_slo(SLO(**own), SLO(**service), 2.0) == SLO(**resolved)


@pytest.mark.parametrize(("own", "service"), [(SLO(e2e_scale=5), SLO()), (SLO(), SLO(e2e_scale=5))])
def test_a_scale_needs_the_execution_time(own: SLO, service: SLO) -> None:
    with pytest.raises(InvalidRequest, match="`shoal profile` or write `execution") as error:
        resolve_slo(own, service, None)
    assert error.value.param == "slo.e2e_scale"


def test_a_goal_given_as_a_time_needs_no_execution_time() -> None:
    assert resolve_slo(SLO(e2e_s=3), SLO(e2e_scale=5), None) == SLO(e2e_s=3)


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ({}, None),
        ({"ttft_s": 0.5}, True),
        ({"ttft_s": 0.4999}, False),
        ({"tpot_s": 0.5}, True),
        ({"tpot_s": 0.4999}, False),
        ({"mtpot_s": 0.75}, True),
        ({"mtpot_s": 0.7499}, False),
        ({"tpot_s": 0.5, "mtpot_s": 0.5}, False),
        ({"e2e_s": 2.5}, True),
        ({"e2e_s": 2.4999}, False),
        ({"ttft_s": 1, "tpot_s": 1, "e2e_s": 5}, True),
        ({"ttft_s": 0.1, "tpot_s": 1, "e2e_s": 5}, False),
        ({"ttft_s": 1, "tpot_s": 0.1, "e2e_s": 5}, False),
        ({"ttft_s": 1, "tpot_s": 1, "e2e_s": 1}, False),
    ],
)
def test_every_goal_must_be_met(slo: dict[str, float], expected: bool | None) -> None:
    """A first token after 0.5 s, then four more, after 0.5 s in the mean and 0.75 s at most."""
    assert met(make_record(), SLO(**slo)) is expected
    assert has_goal(SLO(**slo)) is (expected is not None)


def test_an_output_of_one_token_has_no_time_per_output_token() -> None:
    assert met(make_record(tokens=1), SLO(tpot_s=1e-6, mtpot_s=1e-6)) is True
    assert met(make_record(tokens=1), SLO(tpot_s=1e-6, ttft_s=0.1)) is False


def test_a_scale_must_be_resolved_first() -> None:
    with pytest.raises(ValueError, match="resolve_slo"):
        met(make_record(), SLO(e2e_scale=5))


goals = st.none() | st.floats(0.01, 10)
slos = st.builds(SLO, ttft_s=goals, tpot_s=goals, mtpot_s=goals, e2e_s=goals, e2e_scale=goals)


@given(slos, slos, st.floats(0.1, 10), st.floats(0, 5), st.floats(0, 20), st.integers(1, 50))
def test_effective_goals_are_those_of_the_request_else_of_the_service(
    own: SLO, service: SLO, execution_s: float, ttft: float, decoding: float, tokens: int
) -> None:
    record = make_record(ttft, ttft + decoding, tokens)
    outcomes = []
    later = {"tpot_s": record.tpot_s, "mtpot_s": record.mtpot_s} if tokens > 1 else {}
    for field, time in {"ttft_s": record.ttft_s, "tpot_s": 0.0, "mtpot_s": 0.0, **later}.items():
        goal = getattr(own, field) or getattr(service, field)
        outcomes += [] if goal is None else [time <= goal]
    whose = own if own.e2e_s or own.e2e_scale else service
    outcomes += [] if whose.e2e_s is None else [record.e2e_s <= whose.e2e_s]
    outcomes += [] if whose.e2e_scale is None else [record.e2e_s <= whose.e2e_scale * execution_s]
    expected = all(outcomes) if outcomes else None
    assert met(record, resolve_slo(own, service, execution_s)) is expected


@pytest.mark.parametrize("goal", ["ttft", "tpot", "mtpot", "e2e", "e2e_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300])
def test_goals_are_positive_and_finite(goal: str, value: float) -> None:
    field = goal if goal == "e2e_scale" else f"{goal}_s"
    found = slo_problem(SLO(**{field: value}), 1.0)
    assert found is not None
    assert found[0] == goal
    assert str(value) in found[1]


def test_valid_goals_are_accepted() -> None:
    assert slo_problem(SLO(), None) is None
    assert slo_problem(SLO(ttft_s=1e-9, tpot_s=0.2, mtpot_s=1, e2e_s=3600), None) is None
    assert slo_problem(SLO(e2e_scale=5), 1.0) is None
    goal, wrong = slo_problem(SLO(e2e_scale=5), None) or ("", "")
    assert goal == "e2e_scale"
    assert "`shoal profile`" in wrong
    assert "`execution: 1.2s`" in wrong


def test_attainment_counts_only_those_with_goals() -> None:
    assert attainment([True, None, False, True, None, False]) == 0.5
    assert attainment([True]) == 1.0
    assert math.isnan(attainment([None]))


def test_normalised_latency_is_in_execution_times() -> None:
    assert normalised_latency(make_record(e2e=2.5), 0.5) == 5
