"""Encoding what clients send."""

import json

from models_builders import byte_level_backend

from shoal.models import Tokenizer
from shoal.models.tokenizer.encoding import encode_texts, tokenize
from shoal.models.tokenizer.messages import Encoded

OWN = Tokenizer(byte_level_backend(), special_tokens={}, eos_token_ids=())


class Recording:
    """Has no bound in advance, and records what it encodes."""

    def __init__(self):
        self.lengths = []

    def encode(self, text, add_special_tokens=True):
        self.lengths.append(len(text))
        return [0] * len(text)

    def token_bytes(self, token):
        return b"?"

    def least_tokens(self, text):
        return 0


def test_all_texts_are_encoded():
    assert encode_texts(OWN, ["a", "", "the"], True, None).tokens == [
        OWN.encode("a"),
        [],
        OWN.encode("the"),
    ]


def test_a_text_that_is_surely_too_long_is_not_encoded():
    assert encode_texts(OWN, ["ab", "x" * 264, "c"], True, 10) == Encoded([OWN.encode("ab")], 22)


def test_a_text_that_may_be_too_long_is_encoded_in_pieces():
    tokenizer = Recording()
    found = encode_texts(tokenizer, ["x" * 10**6], True, 40_000)
    assert found == Encoded([], 2**16 - 2**14)
    assert tokenizer.lengths == [2**15] * 3
    assert encode_texts(tokenizer, ["x" * 40_000], True, 40_000).tokens == [[0] * 40_000]


def test_tokens_as_json():
    text = "the 🦈é"
    tokens = OWN.encode(text)
    tokenized = tokenize(OWN, text, True, True)
    assert (tokenized.count, json.loads(tokenized.tokens)) == (len(tokens), tokens)
    assert json.loads(tokenized.strings) == [OWN.token_text(token) for token in tokens]
    assert tokenize(OWN, text, True, False).strings is None
