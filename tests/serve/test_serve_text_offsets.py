"""Offsets of tokens in the text of completions."""

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st
from serve_builders import completion, events, post

from shoal.serve.openai.text_offsets import TextOffsets

COMPLETIONS = "/v1/completions"
TEXT = "naïve 日本 test 🐟"
# Where the character of each byte begins.
OFFSETS = [offset for offset, character in enumerate(TEXT) for _ in character.encode()]


class PieceTokenizer:
    """Tokens are given by their bytes; a text loses the space it begins with, as in SentencePiece."""

    def __init__(self, pieces, special=(), strip=False):
        self.pieces, self.special, self.strip = pieces, special, strip

    def token_bytes(self, token):
        return self.pieces[token]

    def decode(self, tokens, skip_special_tokens=True):
        shown = [t for t in tokens if not (skip_special_tokens and t in self.special)]
        text = b"".join(self.pieces[t] for t in shown).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip else text


def choice_of(**fields):
    response = asyncio.run(post(COMPLETIONS, completion(prompt=TEXT, logprobs=0, **fields)))
    return response.json()["choices"][0]


def test_offsets_in_an_echo_count_characters():
    choice = choice_of(max_tokens=0, echo=True)
    assert choice["text"] == TEXT
    assert choice["logprobs"]["text_offset"] == [0, *OFFSETS]  # the first token begins a text


def test_offsets_continue_after_an_echo():
    count = len(OFFSETS)
    choice = choice_of(max_tokens=count, echo=True)
    assert choice["text"] == TEXT * 2
    assert choice["logprobs"]["text_offset"] == [0, *OFFSETS, *(len(TEXT) + offset for offset in OFFSETS)]


def test_offsets_in_whole_and_streamed_outputs_count_characters():
    count = len(OFFSETS)
    assert choice_of(max_tokens=count)["logprobs"]["text_offset"] == OFFSETS
    body = completion(prompt=TEXT, logprobs=0, max_tokens=count, stream=True)
    chunks = [chunk["choices"][0] for chunk in events(asyncio.run(post(COMPLETIONS, body)).text)[:-1]]
    streamed = [chunk["logprobs"]["text_offset"] for chunk in chunks if chunk["logprobs"]]
    assert list(itertools.chain(*streamed)) == OFFSETS


@given(st.text(st.sampled_from("ab é€😀\ufffd"), max_size=30), st.lists(st.integers(0, 99)), st.booleans())
def test_offsets_are_those_of_the_first_bytes(text, cuts, strip):
    data = text.encode()
    edges = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    offsets = TextOffsets(PieceTokenizer(pieces, strip=strip))
    lost = strip and text.startswith(" ")
    expected = [max(0, len(data[:edge].decode(errors="ignore")) - lost) for edge in edges[:-1]]
    assert [offsets.push(token) for token in range(len(pieces))] == expected


def test_bytes_that_are_no_text_are_one_character_each():
    offsets = TextOffsets(PieceTokenizer([b"a", b"\xff", b"\xff", b"b", b"\xe6", b"\x97", b"\xa5", b"c"]))
    assert [offsets.push(token) for token in range(8)] == [0, 1, 2, 3, 4, 4, 4, 5]


def test_special_tokens_count_if_they_are_in_the_echo():
    tokenizer = PieceTokenizer([b"<s>", b"<end>", b"a", b"<end>"], special={0, 1, 3})
    for echo, expected in (("<end>a<end>", [0, 0, 5, 6]), ("a", [0, 0, 0, 1])):
        offsets = TextOffsets(tokenizer, echo=echo)
        assert [offsets.push(token) for token in range(4)] == expected
