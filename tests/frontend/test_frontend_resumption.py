"""Requests resumed from earlier output: readers, engines, engine processes, the offline API."""

from dataclasses import replace

import pytest
from engine_builders import (
    EOS,
    ByteTokenizer,
    expected_tokens,
    make_engine,
    make_request,
    run_all,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal import SamplingParams, Shoal
from shoal.core import FinishReason, InvalidRequest, RequestRecord, ResumeState, TokenEvent
from shoal.frontend.reader import ChoiceReader
from shoal.kvcache.options import KVCacheOptions

PROMPT = [97, 98, 99, 100, 101]
CARRIED = ResumeState(max_new_tokens=8, num_admissions=1)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | fields))


def read_all(
    reader: ChoiceReader, tokens: tuple[int, ...]
) -> tuple[str, str | int | None, FinishReason | None, RequestRecord | None]:
    """What a reader makes of the rest of an output, told token by token: until a stop string or its end."""
    delta = reader.read_past(50)
    text = reader.past_text + ("" if delta is None else delta.text)
    for at, token in enumerate(tokens, start=1):
        if reader.finish is not None:
            break
        last = at == len(tokens)
        stop = token if last and token in (EOS, ord("!")) else None
        finish = None if not last else FinishReason.LENGTH if stop is None else FinishReason.STOP
        delta = reader.read(TokenEvent("r", (token,), finish=finish, stop_token=stop), 50)
        text += delta.text
    return text, None if delta is None else delta.stop_reason, reader.finish, reader.record()


@given(
    st.text("ab€é", min_size=1, max_size=12),
    st.lists(st.text("ab€é", min_size=1, max_size=4), max_size=3, unique=True),
    st.integers(0, 4),
    st.sampled_from([(), (EOS,), (ord("!"),)]),
)
@settings(max_examples=examples(200), deadline=None)
def test_a_reader_resumes_after_any_token(text, stops, min_tokens, end):
    """Also within a character or a stop string."""
    sampling = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, stop_token_ids=(ord("!"),))
    tokens = (*text.encode(), *end)
    request = replace(make_request("r", [97], min_tokens=min_tokens, max_tokens=99), arrival_ns=50)
    whole = read_all(ChoiceReader(request, 0, sampling, ByteTokenizer()), tokens)
    shown = ""
    before = ChoiceReader(request, 0, sampling, ByteTokenizer())
    for cut in range(len(tokens)):
        resumed = replace(request, output_tokens=tokens[:cut])
        reader = ChoiceReader(resumed, 0, sampling, ByteTokenizer())
        assert reader.past_text == shown, "what was shown before is what is not shown again"
        assert read_all(reader, tokens[cut:]) == whole
        shown += before.read(TokenEvent("r", tokens[cut : cut + 1]), 50).text


def test_a_stop_token_in_the_earlier_output_has_no_text():
    sampling = SamplingParams(stop=("b!",), stop_token_ids=(ord("!"),))
    request = replace(make_request("r"), output_tokens=tuple(b"ab!"))
    reader = ChoiceReader(request, 0, sampling, ByteTokenizer())
    assert (reader.past_text, reader.output_tokens, reader.read_past(0)) == ("a", 3, None)
    delta = reader.read(TokenEvent("r", (), finish=FinishReason.STOP, stop_token=ord("!")), 0)
    assert (delta.text, delta.tokens, delta.stop_reason) == ("b", (), ord("!"))


def test_a_record_continues_from_the_resume_state():
    state = replace(CARRIED, age_ns=900, first_token_age_ns=700, num_cached_tokens=3)
    request = replace(make_request("r"), output_tokens=tuple(b"abc"), resume_state=state).on_clock(1_000)
    reader = ChoiceReader(request, 0, SamplingParams(), ByteTokenizer())
    assert reader.started
    delta = reader.read(TokenEvent("r", tuple(b"d"), finish=FinishReason.LENGTH), 1_500)
    assert (delta.text, delta.tokens, delta.cached_tokens) == ("d", tuple(b"d"), 3)
    record = reader.record()
    assert record is not None
    assert (record.arrival_ns, record.first_token_ns, record.finish_ns) == (100, 300, 1_500)
    assert record.output_tokens == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_is_resumed_on_another_engine_after_any_step(depth):
    request = make_request("r", 9, max_tokens=12, temperature=1.0, seed=7)
    expected = expected_tokens(request, 12)
    for steps in range(12):
        first, _ = make_engine(scheduler={"depth": depth})
        second, _ = make_engine(scheduler={"depth": depth})
        first.submit(request)
        tokens = [token for _ in range(steps) for event in first.step() for token in event.tokens]
        moved = first.detach("r")
        assert list(moved.output_tokens) == tokens == expected[:steps]
        assert run_all(first) == {}
        second.submit(moved)
        events = run_all(second)["r"]
        assert events[0].position == steps
        assert tokens + [token for event in events for token in event.tokens] == expected
        assert events[-1].finish is FinishReason.LENGTH
        assert second.stats().services["a"].observed.traffic.output_tokens.mean == 12
        for engine in (first, second):
            engine.fake_pool.check_integrity()
            assert engine.fake_pool.live_blocks("a") == 0
    assert first.detach("r") is None


def test_complete_output_ends_with_the_next_step_and_computes_nothing():
    engine, _ = make_engine()
    engine.submit(replace(make_request("r"), output_tokens=tuple(range(97, 105)), resume_state=CARRIED))
    assert engine.unfinished == 1
    assert not engine.idle
    [event] = engine.step()
    assert (event.request_id, event.tokens, event.finish) == ("r", (), FinishReason.LENGTH)
    assert event.position == 8
    assert (engine.fake_executor.steps, engine.unfinished) == (0, 0)


@pytest.fixture
def shoal(fake_models):
    with Shoal("fake", kv_cache=KVCacheOptions(memory_bytes=1 << 14, block_size=4)) as shoal:
        yield shoal


@pytest.mark.parametrize("stop", [(), 3, 5])
def test_offline_output_resumes_after_any_token(shoal, stop):
    sampling = SamplingParams(max_tokens=9, seed=5)
    [first] = shoal.generate("hello", sampling)[0].outputs
    if stop:
        sampling = replace(sampling, stop=(first.text[stop : stop + 3],))
    [whole] = shoal.generate("hello", sampling)[0].outputs
    cuts = range(len(whole.tokens) + 1)
    resumed = shoal.generate(
        ["hello"] * len(cuts), sampling, output_tokens=[whole.tokens[:cut] for cut in cuts]
    )
    for output in resumed:
        [completion] = output.outputs
        apart = replace(completion, record=None, cached_tokens=0)
        assert apart == replace(whole, record=None, cached_tokens=0)
        assert completion.record.output_tokens == len(whole.tokens)


def test_invalid_offline_output_tokens_are_rejected(shoal):
    for output, sampling, message in (
        ([[1], [2]], greedy(), "2 lists for 1 prompts"),
        ([[1]], greedy(n=2), "n is 2; use n=1"),
        ([[1, 2]], greedy(max_tokens=1), "has 2 tokens, .* at most 1"),
        ([[300]], greedy(), "output_tokens token 300"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            shoal.generate("hello", sampling, output_tokens=output)
