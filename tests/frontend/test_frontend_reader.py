from dataclasses import replace

import pytest
from engine_builders import EOS, ByteTokenizer, make_request

from shoal.core import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from shoal.frontend.choice_requests import expand_choices
from shoal.frontend.reader import ChoiceReader


def make_reader(**sampling) -> ChoiceReader:
    params = SamplingParams(**sampling)
    request = replace(make_request("r"), arrival_ns=1_000)
    return ChoiceReader(request, 3, params, ByteTokenizer())


def event(text: bytes = b"", **fields) -> TokenEvent:
    return TokenEvent("r", tuple(text), **fields)


def test_end_of_sequence_is_a_token_without_text():
    reader = make_reader()
    assert reader.read(event(b"hi"), 2_000).text == "hi"
    delta = reader.read(TokenEvent("r", (EOS,), finish=FinishReason.STOP, stop_token=EOS), 5_000)
    assert (delta.choice, delta.text, delta.tokens) == (3, "", (EOS,))
    assert (delta.finish, delta.stop_reason) == (FinishReason.STOP, None)


def test_a_stop_token_is_the_stop_reason_and_has_no_text():
    reader = make_reader(stop_token_ids=(ord("!"),))
    delta = reader.read(event(b"a!", finish=FinishReason.STOP, stop_token=ord("!")), 2_000)
    assert (delta.text, delta.tokens, delta.stop_reason) == ("a", tuple(b"a!"), ord("!"))


def test_stop_string_ends_the_choice_and_drops_later_tokens_and_logprobs():
    reader = make_reader(stop=("cd",))
    logprobs = tuple(TokenLogprobs(t, -1.0) for t in b"bcdef")
    assert reader.read(event(b"a"), 2_000).text == "a"
    delta = reader.read(event(b"bcdef", logprobs=logprobs), 3_000)
    assert (delta.text, delta.tokens, delta.logprobs) == ("b", tuple(b"bcd"), logprobs[:3])
    assert (delta.finish, delta.stop_reason) == (FinishReason.STOP, "cd")
    assert reader.output_tokens == 4


def test_withheld_text_is_in_the_last_delta():
    reader = make_reader(stop=("cd",))
    assert reader.read(event(b"ac"), 2_000).text == "a"
    delta = reader.read(event(b"", finish=FinishReason.LENGTH), 3_000)
    assert (delta.text, delta.finish) == ("c", FinishReason.LENGTH)


def test_record_has_the_times_of_a_finished_choice():
    reader = make_reader()
    reader.read(event(b"a", cached_tokens=4), 2_000)
    assert reader.record() is None
    delta = reader.read(event(b"bc", finish=FinishReason.LENGTH), 6_000)
    assert delta.cached_tokens == 4
    record = reader.record()
    assert record is not None
    assert (record.arrival_ns, record.first_token_ns, record.finish_ns) == (1_000, 2_000, 6_000)
    assert (record.prompt_tokens, record.output_tokens, record.tpot_s) == (5, 3, 2e-6)
    assert record.mtpot_s == 4e-6


def test_the_longest_time_between_two_tokens_stays_known_after_a_move():
    reader = make_reader()
    for token, now_ns in ((b"a", 2_000), (b"b", 9_000), (b"c", 10_000)):
        reader.read(event(token), now_ns)
    moved = reader.resumed_request("again", 11_000)
    assert moved.resume_state is not None
    assert moved.resume_state.largest_gap_ns == 7_000
    resumed = ChoiceReader(moved.on_clock(11_000), 0, SamplingParams(), ByteTokenizer())
    resumed.read(event(b"d", finish=FinishReason.LENGTH), 12_500)
    record = resumed.record()
    assert record is not None
    assert record.largest_gap_ns == 7_000


@pytest.mark.parametrize("finish", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_an_unfinished_choice_has_no_record(finish):
    reader = make_reader()
    reader.read(event(b"a"), 2_000)
    delta = reader.read(event(finish=finish, error="why"), 3_000)
    assert (delta.finish, delta.error, reader.record()) == (finish, "why", None)


def test_choices_have_their_own_seeds_and_ids():
    requests = expand_choices("c", "a", [1, 2], SamplingParams(n=5, seed=7, stop=("x",)), 9)
    assert len({r.seed for r in requests}) == len({r.id for r in requests}) == 5
    assert all(r.sampling.n == 1 and r.sampling.stop == () and r.arrival_ns == 9 for r in requests)
    again = expand_choices("other", "a", [1, 2], SamplingParams(n=2, seed=7), 0)
    assert [r.seed for r in again] == [r.seed for r in requests[:2]]


def test_without_a_seed_each_call_draws_one():
    def seed() -> int:
        return expand_choices("c", "a", [1], SamplingParams(), 0)[0].seed

    assert len({seed() for _ in range(8)}) == 8
