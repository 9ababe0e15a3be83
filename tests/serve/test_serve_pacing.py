"""Streams whose tokens come in bursts, paced."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import pytest
import serve_builders
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_builders import SERVICES, post

from hypothesis_profiles import examples
from shoal.core import SLO, EngineDied, FinishReason, SamplingParams
from shoal.frontend.reader import Delta
from shoal.frontend.stream import Stream
from shoal.serve import generation
from shoal.serve.generation import Generation, GenerationRequest
from shoal.serve.metrics.server_metrics import ServerMetrics
from shoal.serve.pacing import Pacer, pace
from virtual_loop import run_virtually

GOAL_S = 0.5
GAPS = st.one_of(st.just(0.0), st.floats(0, 0.2), st.floats(0, 3))


def delta(number, tokens=1, *, choice=0, last=False):
    finish = FinishReason.LENGTH if last else None
    return Delta(choice=choice, text=f"{number} ", tokens=(number,) * tokens, finish=finish)


@st.composite
def arrivals(draw):
    """Times and deltas of an output."""
    gaps = draw(st.lists(GAPS, min_size=1, max_size=30))
    now_s, found = 0.0, []
    for number, gap_s in enumerate(gaps):
        now_s += gap_s
        tokens = draw(st.sampled_from((0, 1, 1, 1, 3)))
        found.append((now_s, delta(number, tokens, last=number == len(gaps) - 1)))
    return found


def sent_by_pacer(found):
    """(time, delta) of what goes out; the pacer is asked when it says so and when something comes."""
    pacer, sent = Pacer(GOAL_S), []

    def pop(now_s):
        sent.extend((now_s, each) for each in pacer.pop(now_s))

    for came_s, each in found:
        while (due_s := pacer.due_s) is not None and due_s < came_s:
            pop(due_s)
        pacer.push(each, came_s)
        pop(came_s)
    return sent


@settings(max_examples=examples(200))
@given(arrivals())
def test_a_token_waits_until_the_goal_after_the_one_before_and_not_longer(found):
    sent = sent_by_pacer(found)
    assert [each for _, each in sent] == [each for _, each in found]
    end_s = found[-1][0]
    token_s, before_s = -GOAL_S, 0.0
    for (sent_s, each), (came_s, _) in zip(sent, found, strict=True):
        earliest_s = max(came_s, before_s, token_s + GOAL_S if each.tokens else 0.0)
        assert sent_s == pytest.approx(min(earliest_s, end_s))
        before_s, token_s = sent_s, sent_s if each.tokens else token_s
    gaps_s = [later - earlier for (earlier, _), (later, _) in pairwise(sent)]
    unavoidable_s = max((later - earlier for (earlier, _), (later, _) in pairwise(found)), default=0)
    assert max(gaps_s, default=0) <= max(GOAL_S, unavoidable_s) + 1e-9, "pacing makes no gap above the goal"


def test_a_late_timer_does_not_delay_later_tokens():
    pacer = Pacer(GOAL_S)
    for number in range(4):
        pacer.push(delta(number), 0.0)
    times = []
    for now_s in (0.0, 0.6, 1.1, 1.5):
        assert pacer.due_s <= now_s
        times.append((now_s, len(list(pacer.pop(now_s)))))
    assert [count for _, count in times] == [1, 1, 1, 1]


def test_after_a_long_stop_held_tokens_do_not_come_at_once():
    pacer = Pacer(GOAL_S)
    for number in range(4):
        pacer.push(delta(number), 0.0)
    assert [len(list(pacer.pop(now_s))) for now_s in (0.0, 10.0, 10.1, 10.5)] == [1, 2, 0, 1]


async def bursts(error=None):
    """Two choices: bursts of three tokens every two seconds, and one of one token a second."""
    for second in range(7):
        for number in range(3 if second % 2 == 0 else 0):
            yield 0, delta(10 * second + number)
        yield 1, delta(second, choice=1, last=second == 6)
        await asyncio.sleep(1)
    if error is not None:
        raise error
    yield 0, delta(99, last=True)


def play(source):
    """(time, choice, token) of what is sent, and the error at the end."""

    async def main():
        sent, loop = [], asyncio.get_running_loop()
        try:
            async with aclosing(pace(source, GOAL_S)) as paced:
                async for index, each in paced:
                    sent.append((round(loop.time(), 6), index, each.tokens[0]))
        except EngineDied as error:
            return sent, error
        return sent, None

    return run_virtually(main())


def test_choices_are_paced_apart_and_the_end_sends_all():
    sent, error = play(bursts())
    assert error is None
    assert [time_s for time_s, choice, _ in sent if choice == 1] == [0, 1, 2, 3, 4, 5, 6]
    first = [(time_s, token) for time_s, choice, token in sent if choice == 0]
    assert first[:6] == [(0, 0), (0.5, 1), (1, 2), (2, 20), (2.5, 21), (3, 22)]
    assert first[-1] == (7, 99)


def test_an_error_comes_after_what_was_held():
    async def failing():
        for number in range(5):
            yield 0, delta(number)
        await asyncio.sleep(0.7)
        raise EngineDied("gone")

    sent, error = play(failing())
    assert [token for _, _, token in sent] == [0, 1, 2, 3, 4]
    assert [time_s for time_s, _, _ in sent] == [0, 0.5, 0.7, 0.7, 0.7]
    assert str(error) == "gone"


def test_a_client_that_leaves_ends_the_source():
    ended = []

    async def endless():
        try:
            for number in range(10**6):
                yield 0, delta(number)
                await asyncio.sleep(0.01)
        finally:
            ended.append(True)

    async def main():
        source = endless()
        async with aclosing(source), aclosing(pace(source, GOAL_S)) as paced:
            async for _ in paced:
                break
        assert ended == [True]

    run_virtually(main())


def test_latencies_are_recorded_when_tokens_are_sent(monkeypatch):
    times = []

    def note(running, index, each):
        times.append(round(asyncio.get_running_loop().time(), 1))

    monkeypatch.setattr(Generation, "_record_delta", note)

    async def burst(stream):
        for number in range(3):
            stream.push(delta(number))
            await asyncio.sleep(0.001)
        await asyncio.sleep(3)
        stream.push(delta(3, last=True))
        stream.end()

    async def main():
        stream = Stream("r", 3, lambda: None)
        request = GenerationRequest(
            id="g", service="base", prompts=[[1]], sampling=SamplingParams(), arrival_ns=0
        )
        bursting = asyncio.create_task(burst(stream))
        async for _ in Generation(request, [stream], ServerMetrics([SERVICES[1]])).deltas(GOAL_S):
            pass
        await bursting

    run_virtually(main())
    assert times == [0, 0.5, 1, 3]


@pytest.mark.parametrize(
    ("path", "body", "paced_s"),
    [
        ("/v1/completions", {"prompt": "hi"}, 0.5),
        ("/v1/completions", {"prompt": "hi", "slo": {"tpot": 0.25}}, 0.25),
        ("/v1/completions", {"prompt": "hi", "slo": {"ttft": 0.25}}, 0.5),
        ("/v1/completions", {"prompt": "hi", "model": "base", "slo": {"tpot": 0.25}}, None),
        ("/v1/completions", {"prompt": "hi", "stream": False}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 0.5),
        ("/v1/responses", {"input": "hi", "slo": {"tpot": 0.25}}, 0.25),
        ("/api/generate", {"prompt": "hi"}, 0.5),
    ],
)
def test_streams_of_a_paced_service_are_paced_to_its_goal_or_that_of_the_request(
    monkeypatch, path, body, paced_s
):
    goals = []

    def note(deltas, goal_s):
        goals.append(goal_s)
        return deltas

    monkeypatch.setattr(generation, "pace", note)
    services = (replace(SERVICES[0], pace=True, slo=SLO(tpot_s=0.5)), SERVICES[1])
    monkeypatch.setattr(serve_builders, "SERVICES", services)
    response = asyncio.run(post(path, {"model": "chat", "stream": True} | body))
    assert response.status_code == 200
    assert goals == ([] if paced_s is None else [paced_s])
