"""The traffic of an interval: what came is replayed, what ended is counted."""

from itertools import count

import pytest

from shoal.cluster.placing.traffic import ReplayedRequest, Traffic
from shoal.core import SLO, FinishReason, Request, RequestRecord, SamplingParams

GOAL = SLO(e2e_s=2.0)
S = 10**9
_numbers = count()


def come(traffic: Traffic, at_s: float, service: str = "a", choices: int = 1, prompt: int = 5) -> str:
    call = f"call{next(_numbers)}"
    request = Request(
        id=call,
        service=service,
        prompt=[1] * prompt,
        arrival_ns=int(at_s * S),
        sampling=SamplingParams(max_tokens=40),
    )
    traffic.arrived(call, request, range(choices), GOAL)
    return call


def finish(traffic: Traffic, call: str, tokens: int, e2e_s: float, service: str = "a", choice: int = 0):
    record = RequestRecord(
        request_id=call,
        service=service,
        arrival_ns=0,
        first_token_ns=S // 10,
        finish_ns=int(e2e_s * S),
        prompt_tokens=5,
        output_tokens=tokens,
    )
    traffic.ended(call, choice, FinishReason.STOP, tokens, record)


def test_requests_that_came_are_replayed_with_their_outputs():
    traffic = Traffic(0)
    calls = [come(traffic, at) for at in (1.0, 2.0, 3.0, 4.0)]
    finish(traffic, calls[0], 10, 1.0)
    finish(traffic, calls[1], 20, 1.0)
    traffic.ended(calls[2], 0, FinishReason.CANCELLED, 3, None)
    facts = traffic.facts(["a"], 5 * S)
    assert [each.output_tokens for each in facts.requests] == [10, 20, 3, 11]
    assert facts.requests[0] == ReplayedRequest("a", S, 5, 40, 10, GOAL)
    assert (facts.length_s, facts.window_s) == (5.0, 5.0)


def test_what_ended_is_counted_by_service():
    traffic = Traffic(0)
    calls = [come(traffic, 1.0) for _ in range(5)]
    finish(traffic, calls[0], 10, 1.0)
    finish(traffic, calls[1], 10, 3.0)
    traffic.ended(calls[2], 0, FinishReason.REFUSED, 0, None)
    traffic.ended(calls[3], 0, FinishReason.CANCELLED, 4, None)
    traffic.ended("another's", 0, FinishReason.STOP, 4, None)
    facts = traffic.facts(["a", "b"], 5 * S)
    a, b = facts.services["a"], facts.services["b"]
    assert (a.arrived, a.ended, a.unserved, a.answered, a.latency_s) == (5, 3, 2, 2, 4.0)
    assert a.attainment == pytest.approx(1 / 3)
    assert a.mean_latency_s == 2.0
    assert (b.arrived, b.attainment, b.mean_latency_s) == (0, 1.0, None)
    achieved = facts.achieved({"a": 0.5})
    assert achieved.services["a"].normalised_latency == 4.0
    assert achieved.attainment == pytest.approx(1 / 3)


def test_choices_of_a_call_count_each():
    traffic = Traffic(0)
    call = come(traffic, 1.0, choices=2)
    finish(traffic, call, 10, 1.0, choice=1)
    facts = traffic.facts(["a"], 2 * S)
    assert (facts.services["a"].arrived, facts.services["a"].ended) == (2, 1)
    assert [each.output_tokens for each in facts.requests] == [10, 10]


def test_a_new_interval_forgets_what_came_and_counts_what_ends_in_it():
    traffic = Traffic(0)
    call = come(traffic, 1.0)
    traffic.begin(2 * S)
    finish(traffic, call, 10, 2.5)
    facts = traffic.facts(["a"], 4 * S)
    assert facts.requests == ()
    assert (facts.services["a"].arrived, facts.services["a"].unserved) == (0, 1)
    assert facts.length_s == 2.0


def test_the_latest_requests_are_kept_with_the_time_they_took_to_come():
    traffic = Traffic(0, most=10)
    for number in range(30):
        come(traffic, number)
    facts = traffic.facts(["a"], 30 * S)
    assert len(facts.requests) == 10
    assert facts.services["a"].arrived == 30
    assert facts.window_s == 10.0
    traffic.begin(30 * S)
    come(traffic, 31)
    assert traffic.facts(["a"], 32 * S).window_s == 2.0
