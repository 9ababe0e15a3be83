import itertools

from engine_builders import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.frontend.detokenize import IncrementalDecoder, IncrementalDetokenizer, StopStrings

TEXT = st.text(st.sampled_from("ab é€😀\ufffd\n") | st.characters(codec="utf-8"), max_size=40)


class CountingDecoder:
    """Decodes tokens given as bytes; strip: a text loses its leading space, as in SentencePiece."""

    def __init__(self, vocabulary: list[bytes | None], strip: bool = False) -> None:
        self.vocabulary = vocabulary
        self.strip = strip
        self.longest = 0
        self.decoded = 0

    def decode(self, tokens, skip_special_tokens=True):
        assert skip_special_tokens
        self.longest = max(self.longest, len(tokens))
        self.decoded += len(tokens)
        text = b"".join(self.vocabulary[t] or b"" for t in tokens).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strip else text


def split_bytes(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


CUTS = st.lists(st.integers(0, 200), max_size=60)


@given(TEXT, CUTS, st.booleans())
def test_pieces_add_up_to_the_decoded_text(text, cuts, strip):
    pieces = split_bytes(text.encode(), cuts)
    decoder = CountingDecoder(pieces, strip)
    whole = decoder.decode(range(len(pieces)))
    reader = IncrementalDecoder(decoder)
    shown = [reader.push(token) for token in range(len(pieces))]
    assert "".join(shown) + reader.finish() == whole


@given(st.lists(st.sampled_from([b"a", b"\xff", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", None]), max_size=80))
def test_pieces_of_invalid_bytes_add_up(pieces):
    decoder = CountingDecoder(pieces)
    whole = decoder.decode(range(len(pieces)))
    reader = IncrementalDecoder(decoder)
    assert "".join(reader.push(token) for token in range(len(pieces))) + reader.finish() == whole


@given(TEXT, CUTS)
def test_no_piece_has_part_of_a_character(text, cuts):
    text = text.replace("\ufffd", "?")
    pieces = split_bytes(text.encode(), cuts)
    reader = IncrementalDecoder(CountingDecoder(pieces))
    assert not any("\ufffd" in reader.push(token) for token in range(len(pieces)))


def test_the_window_is_bounded():
    for vocabulary in ([b"ab"], [b"\xff"], [b"\xe2"], [None], [None, b"\xff", b"a"]):
        decoder = CountingDecoder(vocabulary)
        reader = IncrementalDecoder(decoder)
        for position in range(2000):
            reader.push(position % len(vocabulary))
        assert decoder.longest <= 40
        assert decoder.decoded <= 2000 * 40


def test_a_character_appears_with_its_last_token():
    euro = "€".encode()
    reader = IncrementalDecoder(CountingDecoder([bytes([b]) for b in euro] + [b"x"]))
    assert [reader.push(token) for token in (0, 1, 2, 3)] == ["", "", "€", "x"]


def test_unfinished_character_is_shown_at_the_end():
    reader = IncrementalDecoder(CountingDecoder([b"a", b"\xe2\x82"]))
    assert [reader.push(0), reader.push(1), reader.finish()] == ["a", "", "\ufffd"]


def test_context_keeps_the_leading_space():
    decoder = CountingDecoder([b"is", b" Paris"], strip=True)
    assert IncrementalDecoder(decoder).push(1) == "Paris"
    assert IncrementalDecoder(decoder, context=[0]).push(1) == " Paris"


def test_context_that_ends_within_a_character_is_not_used():
    decoder = CountingDecoder([b"\xe2\x82", b"\xac", b"x"])
    reader = IncrementalDecoder(decoder, context=[0])
    assert reader.push(1) + reader.push(2) + reader.finish() == "\ufffdx"


def naive_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Cut a text at the first complete stop string, the longest if several; character by character."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30), max_size=30),
)
@settings(max_examples=examples(400))
def test_stop_strings_cut_where_a_naive_search_does(text, stops, cuts):
    checker = StopStrings(stops)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    shown = ""
    for start, end in itertools.pairwise(edges):
        shown += checker.push(text[start:end])
        expected, found = naive_cut(text[:end], stops)
        assert expected.startswith(shown)
        assert checker.found == found
        if found:
            break
    shown += checker.release()
    assert (shown, checker.found) == naive_cut(text, stops)


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_a_possible_start_of_a_stop_string_is_withheld(text, stops):
    checker = StopStrings(stops)
    shown = "".join(checker.push(character) for character in text)
    cut, found = naive_cut(text, stops)
    if found is None:
        held = cut[len(shown) :]
        ends = [cut[i:] for i in range(len(cut)) if any(s.startswith(cut[i:]) for s in stops)]
        assert held == max(ends, key=len, default="")


def test_stop_string_over_several_tokens():
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), stop=["END"])
    shown = [detokenizer.push(token) for token in b"oEN"]
    assert shown == ["o", "", ""]
    assert detokenizer.stop_reason is None
    assert detokenizer.push(ord("D")) == ""
    assert detokenizer.stop_reason == "END"
    assert detokenizer.push(ord("x")) + detokenizer.finish() == ""


def test_withheld_text_is_released_at_the_end():
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), stop=["END"])
    assert [detokenizer.push(token) for token in b"oEN"] == ["o", "", ""]
    assert detokenizer.finish() == "EN"
    assert detokenizer.stop_reason is None


def test_stop_strings_do_not_count_within_min_tokens():
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), stop=["a"], min_tokens=2)
    assert [detokenizer.push(token) for token in b"aaxa"] == ["a", "a", "x", ""]
    assert detokenizer.stop_reason == "a"


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
def test_stop_strings_can_be_shown(text, stops):
    checker = StopStrings(stops, include=True)
    shown = ""
    for character in text:
        shown += checker.push(character)
        if checker.found:
            break
    cut, found = naive_cut(text, stops)
    assert (shown + checker.release(), checker.found) == (cut + (found or ""), found)


def test_special_tokens_are_decoded_on_request():
    class Special(ByteTokenizer):
        def decode(self, tokens, skip_special_tokens=True):
            return "".join(chr(t) if t < 256 else "" if skip_special_tokens else f"<{t}>" for t in tokens)

    for skipped, text in ((True, "ab"), (False, "a<257>b<258>")):
        detokenizer = IncrementalDetokenizer(Special(), skip_special_tokens=skipped)
        shown = [detokenizer.push(token) for token in (97, 257, 98, 258)]
        assert "".join(shown) + detokenizer.finish() == text
