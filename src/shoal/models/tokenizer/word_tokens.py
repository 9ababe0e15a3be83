"""Tokens that are whole words, of which a text can be made that no model wrote."""

import re
from array import array
from collections.abc import Collection
from pathlib import Path

from shoal.models.conversion.run_conversion import has_tokenizer, tokenizer_folder
from shoal.models.progress import silent
from shoal.models.tokenizer.added_tokens import TOKENIZER_FILE
from shoal.models.tokenizer.load import load_backend
from shoal.models.tokenizer.vocabulary import Vocabulary

_WORD = re.compile(rb" [a-z]{2,}")
_FEWEST = 256
"""With fewer words, a text of them alone would repeat itself."""


def word_tokens(folder: Path, vocab_size: int, end_tokens: Collection[int]) -> "array[int]":
    """Ids below ``vocab_size`` of words with a blank before them, in the tokenizer of a model's folder.

    Each is a piece of text of its own, which a stream sends as soon as it is there. Where there are few, all
    ids that are not special; without a tokenizer all ids. Never one of ``end_tokens``. Raises as
    ``Tokenizer.from_folder``.
    """
    ids = range(vocab_size)
    if has_tokenizer(folder):
        vocabulary = Vocabulary.of(load_backend(tokenizer_folder(folder, silent) / TOKENIZER_FILE))
        plain = [token for token in ids if vocabulary.is_plain(token)]
        words = [token for token in plain if _WORD.fullmatch(vocabulary.token_bytes(token))]
        chosen = words if len(words) >= _FEWEST else plain
    else:
        chosen = list(ids)
    return array("I", [token for token in chosen if token not in end_tokens] or ids[:1])
