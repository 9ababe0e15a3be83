"""Added and special tokens from a tokenizer's files, and completing a tokenizer.json that lacks some.

``tokenizer.json`` lists the tokens that it splits from a text. Folders of fine-tuned models list more in
``tokenizer_config.json``, ``special_tokens_map.json`` or ``added_tokens.json``. They are added in the order
of transformers, so that they get the same ids.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import tokenizers

from shoal.core import ModelUnavailable
from shoal.models.folder.file_results import FileResults
from shoal.models.folder.json_files import read_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that assign roles to tokens."""
ADDED_TOKENS_FILE = "added_tokens.json"

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# In the vocabulary, a name is followed by a number; inside of strings, quotes are escaped.
_LIST = re.compile(rb'(?<!\\)"added_tokens"\s*:\s*(?=\[)')
# Parsed at first, and times as much if that is not all: most lists are short, others have a megabyte.
_LIST_BYTES, _LIST_GROWTH = 2**16, 32
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Summary:
    """What is needed of the list of a tokenizer.json, which may have thousands of tokens."""

    complete: bool
    """See ``is_complete``."""
    ids: Mapping[str, Any]
    """The ``id`` of each listed token with a role, by text."""


_summaries = FileResults[_Summary]()


@dataclass(frozen=True, slots=True)
class NamedToken:
    """An added token, which is never split."""

    text: str
    special: bool
    """Omitted from decoded text."""
    normalized: bool
    """Matched in normalized text."""
    lstrip: bool = False
    """Includes blanks before it."""
    rstrip: bool = False
    """Includes blanks after it."""
    single_word: bool = False
    """Not matched inside a word."""


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of tokens with a role, such as ``eos_token``, in the tokenizer's files in ``folder``."""
    roles = _roles(*(read_json(folder / name) for name in CONFIG_FILES))
    return {role: token.text for role, token in roles.items()}


def stored_tokens(file: Path) -> dict[str, Mapping[str, Any]]:
    """The added tokens that ``file``, a tokenizer.json, lists, by text; {} if it is broken."""
    entries = (entry for entry in _listed(file) if isinstance(entry, Mapping))
    return {entry["content"]: entry for entry in entries if isinstance(entry.get("content"), str)}


def stored_id(folder: Path, text: str) -> Any:
    """The ``id`` of ``text``, a token with a role, in the tokenizer.json in ``folder``; None if it is not
    listed."""
    return _summary(folder).ids.get(text)


def _listed(file: Path) -> list[Any]:
    """Parse only the list, which is near the beginning: parsing all of a large file takes a second."""
    if not file.stat().st_size:
        return []
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
        begin = _LIST.search(data)
        size = _LIST_BYTES
        while begin is not None:
            try:
                listed, _ = _DECODER.raw_decode(
                    data[begin.end() : begin.end() + size].decode(errors="replace")
                )
            except (ValueError, RecursionError):
                if begin.end() + size >= len(data):
                    break
                size *= _LIST_GROWTH
            else:
                return listed if isinstance(listed, list) else []
    return []


def is_complete(folder: Path) -> bool:
    """Whether tokenizer.json lists all tokens of the other files in ``folder``, with the same properties."""
    return _summary(folder).complete


def _summary(folder: Path) -> _Summary:
    def summarize() -> _Summary:
        listed = stored_tokens(folder / TOKENIZER_FILE)
        stored = _parse_stored(listed)
        complete = all(stored.get(token.text) == token for token in _named_tokens(folder, stored))
        roles = special_tokens(folder).values()
        return _Summary(complete, {text: listed[text].get("id") for text in roles if text in listed})

    names = (TOKENIZER_FILE, *CONFIG_FILES, ADDED_TOKENS_FILE)
    return _summaries.get([folder / name for name in names], summarize)


def write_complete(folder: Path, target: Path) -> None:
    """Write a tokenizer.json with all tokens of the files in ``folder`` to the folder ``target``."""
    backend = read_backend(folder / TOKENIZER_FILE)
    stored = _parse_stored(stored_tokens(folder / TOKENIZER_FILE))
    backend.add_tokens([tokenizers.AddedToken(**_fields(t)) for t in _named_tokens(folder, stored)])
    backend.save(str(target / TOKENIZER_FILE))


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer in ``file``; raises ModelUnavailable if it is broken."""
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelUnavailable(f"{file} cannot be read: {error}") from error


def _fields(token: NamedToken) -> dict[str, Any]:
    fields = asdict(token)
    return {"content": fields.pop("text"), **fields}


def _parse_stored(listed: Mapping[str, Mapping[str, Any]]) -> dict[str, NamedToken]:
    return {text: _parse_token(entry, bool(entry.get("special"))) for text, entry in listed.items()}


def _named_tokens(folder: Path, stored: Mapping[str, NamedToken]) -> list[NamedToken]:
    """The tokens that transformers adds to the ``stored`` ones, in its order.

    Stored tokens are included if the files describe them, since the descriptions may differ.
    """
    config, special_map = (read_json(folder / name) for name in CONFIG_FILES)
    lists_all = "added_tokens_decoder" in config
    special_map = {} if lists_all else special_map
    roles = _roles(config, special_map)
    further = list(_extra_tokens(config, special_map))
    if lists_all:
        listed = _by_id(config["added_tokens_decoder"], folder / CONFIG_FILES[0])
    else:
        special = {token.text for token in (*roles.values(), *further)}
        listed = _by_text(read_json(folder / ADDED_TOKENS_FILE), special, folder / ADDED_TOKENS_FILE)
        listed = [token for token in listed if token.text not in stored] + list(stored.values())
    with_role = {token.text for token in roles.values()}
    tokens = {t.text: replace(t, special=True) if t.text in with_role else t for t in listed}
    for token in (*roles.values(), *further):
        if token.text not in stored:
            tokens.setdefault(token.text, token)
    return list(tokens.values())


def _roles(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, NamedToken]:
    """Tokens by role: the usual roles first, then those of this model, such as ``image_token``."""
    # If tokenizer_config.json lists its tokens, it is newer than the map and has priority.
    first, second = (config, special_map) if "added_tokens_decoder" in config else (special_map, config)
    entries = {**second, **{name: value for name, value in first.items() if value is not None}}
    own = entries.get("extra_special_tokens")
    entries |= own if isinstance(own, Mapping) else {}
    names = [*_ROLES, *(name for name in entries if _is_own_role(name, own))]
    found = {name: _token(entries.get(name)) for name in names}
    return {name: token for name, token in found.items() if token is not None}


def _is_own_role(name: str, own: Any) -> bool:
    return name not in _ROLES and (name.endswith("_token") or (isinstance(own, Mapping) and name in own))


def _extra_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> Iterator[NamedToken]:
    """Special tokens without a role."""
    for file in (config, special_map):
        for name in ("extra_special_tokens", "additional_special_tokens"):
            listed = file.get(name)
            for value in listed if isinstance(listed, list) else ():
                if token := _token(value):
                    yield token


def _token(value: Any) -> NamedToken | None:
    """A special token, given as its text or as an object."""
    if isinstance(value, str) and value:
        return NamedToken(value, special=True, normalized=False)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str) and value["content"]:
        return _parse_token(value, special=True)
    return None


def _parse_token(value: Mapping[str, Any], special: bool) -> NamedToken:
    return NamedToken(
        value["content"],
        special=special,
        normalized=bool(value.get("normalized", not special)),
        lstrip=bool(value.get("lstrip")),
        rstrip=bool(value.get("rstrip")),
        single_word=bool(value.get("single_word")),
    )


def _by_id(entries: Any, file: Path) -> list[NamedToken]:
    try:
        ordered = [entries[number] for number in sorted(entries, key=int)]
        tokens = [_parse_token(entry, bool(entry.get("special"))) for entry in ordered]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelUnavailable(
            f"{file}: added_tokens_decoder must be an object of tokens by their ids: {error!r:.80}"
        ) from error
    for token in tokens:
        if not isinstance(token.text, str):
            raise ModelUnavailable(f"{file}: the content of an added token must be a text")
    return [token for token in tokens if token.text]


def _by_text(entries: Mapping[str, Any], special: set[str], file: Path) -> list[NamedToken]:
    if not all(type(number) is int for number in entries.values()):
        raise ModelUnavailable(f"{file} must hold ids by the texts of their tokens")
    ordered = sorted(entries, key=lambda text: int(entries[text]))
    return [NamedToken(text, text in special, text not in special) for text in ordered if text]
