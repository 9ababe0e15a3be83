"""Texts of about as many tokens as the prompts of a workload."""

from itertools import pairwise

from shoal.bench import make_calls
from shoal.core import NO_GOALS, SLO, Request, SamplingParams, SyntheticPrompt


def request(number, length, hashes=(), **more):
    return Request(
        id=f"r{number}", service="chat", prompt=SyntheticPrompt(length, hashes), seed=number, **more
    )


def texts(*requests, seed=0):
    return [call.text.split() for call in make_calls(requests, seed, NO_GOALS, 16)]


def test_a_prompt_has_a_word_for_each_token():
    assert [len(words) for words in texts(*(request(length, length) for length in (1, 7, 400)))] == [
        1,
        7,
        400,
    ]


def test_prompts_differ_and_depend_on_the_seed():
    first = texts(request(1, 50), request(2, 50))
    assert first[0] != first[1]
    assert texts(request(1, 50), request(2, 50)) == first
    assert texts(request(1, 50), request(2, 50), seed=1) != first


def test_shared_blocks_are_shared_words():
    one, two, three = texts(request(1, 50, (5, 6)), request(2, 40, (5, 7)), request(3, 50, (6, 5)))
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert one[:16] != three[:16]
    assert (len(one), len(two)) == (50, 40)


def test_outputs_are_as_long_as_the_workload_says():
    slo = SLO(ttft_s=1.0)
    limited = SamplingParams(max_tokens=5)
    requests = [
        request(1, 3, true_output_tokens=9),
        request(2, 3, true_output_tokens=9, sampling=limited),
        request(3, 3, true_output_tokens=0),
    ]
    calls = make_calls(requests, 0, slo, 16)
    assert [call.output_tokens for call in calls] == [9, 5, 1]
    assert all(call.slo is slo for call in calls)


def test_calls_keep_the_order_and_times_of_the_requests():
    requests = [request(number, 3, arrival_ns=number * 10) for number in range(5)]
    calls = make_calls(requests, 0, NO_GOALS, 16)
    assert all(one.arrival_ns < two.arrival_ns for one, two in pairwise(calls))
    assert [call.id for call in calls] == [each.id for each in requests]
