"""End-of-sequence token ids of a model, from its configuration files and its tokenizer."""

from pathlib import Path

from shoal.core import ModelUnavailable
from shoal.models.folder.json_files import read_json, text_config
from shoal.models.tokenizer.added_tokens import special_tokens, stored_id


def end_token_ids(folder: Path, tokenizer: Path | None) -> tuple[int, ...]:
    """Ids from generation_config.json, else from config.json, and of the tokenizer's ``eos_token``.

    The files often differ: one has the token of the base model, another that of the chat format. tokenizer:
    folder from ``tokenizer_folder``; None if the model has no tokenizer. Raises ModelUnavailable if a file
    has values that are no token ids.
    """
    own = None if tokenizer is None else _of_tokenizer(folder, tokenizer)
    return tuple(dict.fromkeys([*_from_configs(folder), *([] if own is None else [own])]))


def _from_configs(folder: Path) -> list[int]:
    for file in (folder / "generation_config.json", folder / "config.json"):
        found = text_config(read_json(file)).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise ModelUnavailable(
                f"{file}: eos_token_id must be a token id or a list of them, got {found!r:.80}"
            )
        if ids:
            return ids
    return []


def _of_tokenizer(folder: Path, tokenizer: Path) -> int | None:
    text = special_tokens(tokenizer).get("eos_token")
    if text is None:
        return None
    id = stored_id(tokenizer, text)
    rows = text_config(read_json(folder / "config.json")).get("vocab_size")
    # The model cannot generate a token that is outside of its embedding.
    return None if type(id) is not int or (type(rows) is int and id >= rows) else id
