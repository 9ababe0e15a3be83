"""NoTokenizer: replaces the tokenizer of a model without tokenizer files."""

from pathlib import Path

import tokenizers

from shoal.core import InvalidRequest
from shoal.models.tokenizer.end_tokens import end_token_ids
from shoal.models.tokenizer.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """For a model ``folder`` without tokenizer files: tokens have no text, prompts must be token ids.

    Raises ModelUnavailable if the folder's files have invalid end tokens.
    """

    def __init__(self, folder: Path) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        super().__init__(backend, special_tokens={}, eos_token_ids=end_token_ids(folder, None))
        self._folder = folder

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raise InvalidRequest."""
        raise InvalidRequest(
            f"{self._folder} has no tokenizer files (tokenizer.json), so prompts must be lists of token ids"
        )
