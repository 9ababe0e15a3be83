"""Loading ``tokenizer.json``, which takes seconds for a large vocabulary and blocks all other threads."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from shoal.core import ModelUnavailable
from shoal.models.tokenizer.added_tokens import read_backend
from shoal.models.tokenizer.token_bytes import max_growth

# Real normalizers replace a character by a few at most.
_MAX_GROWTH = 64


def load_backend(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer in ``file``; raises ModelUnavailable if it is broken or unusable."""
    backend = read_backend(file)
    if max_growth(state_of(backend.normalizer)) > _MAX_GROWTH:
        raise ModelUnavailable(f"{file} cannot be used: its normalizer makes short texts enormous")
    _check_usable(backend, file)
    # Padding and truncation are settings of the training run that saved the file.
    backend.no_padding()
    backend.no_truncation()
    return backend


def state_of(part: Any) -> dict[str, Any] | None:
    """The JSON of a part of a tokenizer; None if there is no such part."""
    # The pickled state is that JSON; writing or parsing the whole file would take a second.
    return json.loads(part.__getstate__()) if part is not None else None


def _check_usable(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Raise ModelUnavailable if ordinary texts cannot be encoded."""
    try:
        backend.encode_batch_fast(["A word, 2 numbers: 17\n", "\u00e9\U0001f600"])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library also panics
        raise ModelUnavailable(f"{file} cannot be used: {error!s:.200}") from None
