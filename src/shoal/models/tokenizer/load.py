"""Reading ``tokenizer.json``: seconds of work for a large vocabulary, in which no other thread runs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers

from shoal.core import ModelUnavailable
from shoal.models.tokenizer.added_tokens import read_backend
from shoal.models.tokenizer.token_bytes import growth

# Real normalizers replace one character by a few at most.
_MOST_GROWTH = 64


def digest_of(file: Path) -> str:
    """What files with the same content have in common; raises ModelUnavailable where it cannot be read."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ModelUnavailable(f"{file} cannot be read: {error}") from error


def load_backend(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer that ``file`` describes; raises ModelUnavailable where there is no usable one."""
    backend = read_backend(file)
    if growth(state_of(backend.normalizer)) > _MOST_GROWTH:
        raise ModelUnavailable(f"{file} cannot be used: its normalizer makes short texts enormous")
    _check_usable(backend, file)
    # Padding and truncation are settings of the training run that saved the file.
    backend.no_padding()
    backend.no_truncation()
    return backend


def state_of(part: Any) -> dict[str, Any] | None:
    """The JSON of one part of a tokenizer, None where it has no such part."""
    # The pickled state is that JSON; writing or parsing the whole file would take a second.
    return json.loads(part.__getstate__()) if part is not None else None


def _check_usable(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Raise ModelUnavailable where every text, or one with a new word, would be an error."""
    try:
        backend.encode_batch_fast(["A word, 2 numbers: 17\n", "\u00e9\U0001f600"])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library also panics
        raise ModelUnavailable(f"{file} cannot be used: {error!s:.200}") from None
