from dataclasses import replace

import pytest
from engine_builders import make_engine, make_request, run_all
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import (
    SLO,
    FinishReason,
    Request,
    ResumeState,
    SamplingParams,
    SyntheticPrompt,
    TokenEvent,
    TokenLogprobs,
)
from shoal.engine import wire
from shoal.frontend.choice_requests import expand_choices

LOGPROBS = st.builds(
    TokenLogprobs,
    st.integers(0, 300_000),
    st.floats(-100, 0),
    st.lists(st.tuples(st.integers(0, 300_000), st.floats(-100, 0)), max_size=3).map(tuple),
    st.integers(0, 300_000),
)
EVENTS = st.builds(
    TokenEvent,
    st.text(max_size=8),
    st.lists(st.integers(0, 300_000), max_size=5).map(tuple),
    st.none() | st.lists(LOGPROBS, max_size=3).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.integers(0, 300_000),
    st.none() | st.text(max_size=8),
    st.integers(0, 10_000),
    st.integers(0, 2**62),
    st.none() | st.lists(LOGPROBS, max_size=3).map(tuple),
    st.none() | st.binary(max_size=8),
    st.integers(0, 2**31),
)


@given(st.lists(EVENTS, max_size=5))
def test_events_of_a_step_are_decoded_as_sent(events):
    assert wire.decode_from_engine(wire.encode(wire.Stepped(events))).events == events


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(
            logit_bias=((3, -0.5), (5, 100.0)),
            allowed_token_ids=(3, 5),
            banned_sequences=((3,), (5, 5)),
            skip_special_tokens=False,
            embed=True,
        ),
        SamplingParams(
            temperature=0.5, top_k=3, seed=-(2**63), stop_token_ids=(5, 7), logprobs=2, max_tokens=9
        ),
    ],
)
def test_a_call_is_decoded_as_sent_with_one_prompt(sampling):
    first = Request(
        id="x-0",
        service="a",
        prompt=[1, 2, 3],
        sampling=sampling,
        arrival_ns=2**62,
        seed=2**64 - 1,
        slo=SLO(ttft_s=0.25, e2e_scale=5),
        priority=-3,
        cache_salt="s",
    )
    requests = [first, replace(first, id="x-1", seed=5), replace(first, id="x-2", seed=0)]
    received = wire.decode_to_engine(wire.encode(wire.Submit.from_requests(requests))).to_requests()
    assert received == requests
    assert all(request.prompt is received[0].prompt for request in received)


def test_only_the_first_choice_has_prompt_logprobs():
    sent = expand_choices("x", "a", [1, 2], SamplingParams(n=3, prompt_logprobs=2, seed=1), arrival_ns=5)
    received = wire.decode_to_engine(wire.encode(wire.Submit.from_requests(sent))).to_requests()
    assert received == sent
    assert [request.sampling.prompt_logprobs for request in received] == [2, None, None]


def test_choices_are_decoded_with_their_outputs():
    state = ResumeState(
        max_new_tokens=9, age_ns=2**62, largest_gap_ns=3, num_cached_tokens=4, num_admissions=1
    )
    first = Request(id="x-0", service="a", prompt=[1, 2, 3], output_tokens=(4, 5), resume_state=state)
    requests = [first, replace(first, id="x-2", output_tokens=(), resume_state=replace(state, age_ns=0))]
    synthetic = [replace(first, prompt=SyntheticPrompt(7, (1, 2)), output_tokens=5)]
    for sent in (requests, synthetic):
        received = wire.decode_to_engine(wire.encode(wire.Submit.from_requests(sent)))
        assert received.to_requests() == sent


@pytest.mark.parametrize(
    "message",
    [wire.Hello(1, "s", 5), wire.Cancel(["a", "b"]), wire.AskStats(3)],
    ids=lambda m: type(m).__name__,
)
def test_other_messages_to_the_engine(message):
    assert wire.decode_to_engine(wire.encode(message)) == message


def test_stats_are_decoded_as_sent():
    engine, _ = make_engine("fake", "fake", scheduler={"lengths": "learned"})
    engine.submit(replace(make_request("r"), slo=SLO(e2e_s=1e-9)))
    run_all(engine)
    stats = engine.stats()
    assert stats.services["a"].observed.traffic.attainment == 0
    assert stats.services["a"].observed.accuracy.samples == 1
    assert wire.decode_from_engine(wire.encode(wire.Stats(4, stats))).stats == stats


def test_other_messages_from_the_engine():
    engine, _ = make_engine("fake", "fake")
    for message in (
        wire.Refused("r", "too long", "prompt", "context_length_exceeded"),
        wire.Forgotten(),
        wire.Stats(4, engine.stats()),
    ):
        assert wire.decode_from_engine(wire.encode(message)) == message
