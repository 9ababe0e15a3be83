"""Tokens of which a text is made that no model wrote."""

import pytest

from shoal.models import Tokenizer, read_facts, word_tokens
from simulated_engines import add_tokenizer, make_folder


def test_words_with_a_blank_are_chosen_where_there_are_enough(tmp_path):
    words = add_tokenizer(make_folder(tmp_path))
    facts = read_facts(tmp_path)
    chosen = word_tokens(tmp_path, facts.vocab_size, facts.eos_token_ids)
    assert list(chosen) == words
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(list(chosen[:3])) == " aa ab ac"


def test_end_tokens_and_what_the_model_has_no_row_for_are_left_out(tmp_path):
    words = add_tokenizer(make_folder(tmp_path))
    assert list(word_tokens(tmp_path, words[270], (words[1], words[5]))) == [
        word for word in words[:270] if word not in (words[1], words[5])
    ]


def test_where_words_are_few_all_plain_tokens_are_chosen(tmp_path):
    words = add_tokenizer(make_folder(tmp_path))
    assert list(word_tokens(tmp_path, words[100], (3,))) == [n for n in range(words[100]) if n != 3]


@pytest.mark.parametrize(("ends", "chosen"), [((), [0, 1, 2]), ((1,), [0, 2]), ((0, 1, 2), [0])])
def test_without_a_tokenizer_every_id_is_chosen(tmp_path, ends, chosen):
    assert list(word_tokens(make_folder(tmp_path), 3, ends)) == chosen
