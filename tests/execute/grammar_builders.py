"""A tokenizer for the tiny models: ASCII, some pairs and triples of it, and special tokens."""

from collections.abc import Sequence
from pathlib import Path

from execute_builders import VOCAB
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 2
_SPECIAL = ("<pad>", "<bos>", "</s>")
_CHARACTERS = [chr(code) for code in range(33, 127)] + [
    "Ġ",
    "Ċ",
]  # space and line break, as ByteLevel has them
_PAIRS = [(a, b) for a in 'abc01"' for b in 'abc01":'] + [("ab", "c"), ("{", '"'), ("}", "Ċ"), ("ab", "ab")]


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [*_SPECIAL, *_CHARACTERS, *(a + b for a, b in _PAIRS)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces) <= VOCAB
    tokenizer = Tokenizer(models.BPE(vocab, list(_PAIRS)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in _SPECIAL])
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file


class Letters:
    """Bytes of the tokens."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(file))
        self.size = self._tokenizer.get_vocab_size()

    def piece(self, token: int) -> str:
        """Its text; empty for special ones and those that do not exist."""
        return str(self._tokenizer.decode([token]))

    def text(self, tokens: Sequence[int]) -> str:
        """Text of an output."""
        return str(self._tokenizer.decode(list(tokens)))
