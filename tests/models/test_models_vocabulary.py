"""Tokens to text without the tokenizer: what comes out is what the library's own decoding says."""

import pickle
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from models_builders import byte_level_backend, pieces_backend
from tokenizers import AddedToken, decoders, models

from shoal.core import ModelUnavailable
from shoal.models import Tokenizer, Vocabulary


def words(decoder: object = None) -> tokenizers.Tokenizer:
    """Words whose ids have holes between them, one of them special and one empty."""
    vocab = {"[UNK]": 0, "play": 2, "##ing": 3, "don": 5, "'": 6, "t": 7, "": 8, "a|": 11, "b</w>": 12}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("[UNK]", special=True), AddedToken("<new>", special=True)])
    backend.add_tokens([AddedToken("plain", normalized=False)])
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": byte_level_backend,
    "pieces": pieces_backend,
    "words": words,
    "wordpiece": lambda: words(decoders.WordPiece()),
    "bpe": lambda: words(decoders.BPEDecoder()),
    "ctc": lambda: words(decoders.CTC(word_delimiter_token="|")),
    "metaspace": lambda: words(decoders.Metaspace()),
    "stripped": lambda: words(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])),
}
MADE = {name: make() for name, make in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_texts_are_those_of_the_library(kind: str, data: st.DataObject) -> None:
    backend = MADE[kind]
    vocabulary = pickle.loads(pickle.dumps(Vocabulary.of(backend)))
    own = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    highest = max(backend.get_vocab().values()) + 3
    tokens = data.draw(st.lists(st.integers(0, highest), max_size=12))
    for skip in (True, False):
        expected = backend.decode(tokens, skip_special_tokens=skip)
        assert vocabulary.decode(tokens, skip) == own.decode(tokens, skip) == expected
    for token in tokens:
        assert vocabulary.token_bytes(token) == own.token_bytes(token)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_found_by_their_text(kind: str) -> None:
    backend = MADE[kind]
    own = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    vocabulary = Vocabulary.of(backend)
    for text in (*backend.get_vocab(), "nothing"):
        assert vocabulary.special_ids.get(text) == own.special_token(text)


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    vocabulary = Vocabulary.of(MADE["words"])
    for token in (-1, 1, 4, 10**12):
        assert vocabulary.token_bytes(token) == b""
        assert vocabulary.decode([token]) == ""


def test_a_huge_token_id_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "far": 2**31}, unk_token="[UNK]"))
    with pytest.raises(ModelUnavailable, match="token 2147483648"):
        Vocabulary.of(backend)
