"""Tokens that a tokenizer's files name beside its vocabulary, such as those that begin and end a message.

``tokenizer.json`` lists those that it splits from a text. Folders of fine-tuned models name more in
``tokenizer_config.json``, ``special_tokens_map.json`` or ``added_tokens.json``; transformers adds them in the
order that is followed here, so that they get the same ids.
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
from shoal.models.folder.json_files import read_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Say which token has which role."""
ADDED_TOKENS_FILE = "added_tokens.json"

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A name in the vocabulary has a number behind it, and quotes inside of strings have a backslash before them.
_LIST = re.compile(rb'(?<!\\)"added_tokens"\s*:\s*(?=\[)')
_LIST_BYTES = 2**16
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token that is never split."""

    text: str
    special: bool
    """Left out of texts that are shown."""
    normalized: bool
    """Found in the text as its normalizer leaves it."""
    lstrip: bool = False
    """Takes the blanks before it."""
    rstrip: bool = False
    """Takes the blanks behind it."""
    single_word: bool = False
    """Not found inside a word."""


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens with a role, such as ``eos_token``, that the tokenizer's files in ``folder`` name."""
    roles = _roles(*(read_json(folder / name) for name in CONFIG_FILES))
    return {role: token.text for role, token in roles.items()}


def stored_tokens(file: Path) -> dict[str, Mapping[str, Any]]:
    """What ``file``, a tokenizer.json, lists as added tokens, by their text; {} where it is broken."""
    entries = (entry for entry in _listed(file) if isinstance(entry, Mapping))
    return {entry["content"]: entry for entry in entries if isinstance(entry.get("content"), str)}


def _listed(file: Path) -> list[Any]:
    """The list alone: it stands near the beginning, and parsing all of a large file would take a second."""
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
                size *= 4
            else:
                return listed if isinstance(listed, list) else []
    return []


def is_complete(folder: Path) -> bool:
    """Whether tokenizer.json lists all tokens that the other files in ``folder`` name, and as these do."""
    stored = _stored(folder)
    return all(stored.get(token.text) == token for token in _named_tokens(folder, stored))


def write_complete(folder: Path, target: Path) -> None:
    """Write tokenizer.json with all tokens that the files in ``folder`` name to the folder ``target``."""
    backend = read_backend(folder / TOKENIZER_FILE)
    backend.add_tokens([tokenizers.AddedToken(**_fields(t)) for t in _named_tokens(folder, _stored(folder))])
    backend.save(str(target / TOKENIZER_FILE))


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer that ``file`` describes; raises ModelUnavailable where it is broken."""
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelUnavailable(f"{file} cannot be read: {error}") from error


def _fields(token: NamedToken) -> dict[str, Any]:
    fields = asdict(token)
    return {"content": fields.pop("text"), **fields}


def _stored(folder: Path) -> dict[str, NamedToken]:
    stored = stored_tokens(folder / TOKENIZER_FILE)
    return {text: _of_object(entry, bool(entry.get("special"))) for text, entry in stored.items()}


def _named_tokens(folder: Path, stored: Mapping[str, NamedToken]) -> list[NamedToken]:
    """What transformers adds to the tokens that are ``stored``, in its order.

    These come again where the files describe them, since their descriptions may differ.
    """
    config, special_map = (read_json(folder / name) for name in CONFIG_FILES)
    lists_all = "added_tokens_decoder" in config
    special_map = {} if lists_all else special_map
    roles = _roles(config, special_map)
    further = list(_further(config, special_map))
    if lists_all:
        listed = _by_id(config["added_tokens_decoder"], folder / CONFIG_FILES[0])
    else:
        special = {token.text for token in (*roles.values(), *further)}
        listed = _by_text(read_json(folder / ADDED_TOKENS_FILE), special, folder / ADDED_TOKENS_FILE)
        listed = [token for token in listed if token.text not in stored] + list(stored.values())
    with_role = {token.text for token in roles.values()}
    tokens = {t.text: replace(t, special=t.special or t.text in with_role) for t in listed}
    for token in (*roles.values(), *further):
        if token.text not in stored:
            tokens.setdefault(token.text, token)
    return list(tokens.values())


def _roles(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, NamedToken]:
    """By role: the usual ones first, then those of this model, such as ``image_token``."""
    # Since it lists its tokens, tokenizer_config.json is newer than the map.
    first, second = (config, special_map) if "added_tokens_decoder" in config else (special_map, config)
    entries = {**second, **{name: value for name, value in first.items() if value is not None}}
    own = entries.get("extra_special_tokens")
    entries |= own if isinstance(own, Mapping) else {}
    names = [*_ROLES, *(name for name in entries if _is_own_role(name, own))]
    found = {name: _token(entries.get(name)) for name in names}
    return {name: token for name, token in found.items() if token is not None}


def _is_own_role(name: str, own: Any) -> bool:
    return name not in _ROLES and (name.endswith("_token") or (isinstance(own, Mapping) and name in own))


def _further(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> Iterator[NamedToken]:
    """Special tokens without a role."""
    for file in (config, special_map):
        for name in ("extra_special_tokens", "additional_special_tokens"):
            listed = file.get(name)
            for value in listed if isinstance(listed, list) else ():
                if token := _token(value):
                    yield token


def _token(value: Any) -> NamedToken | None:
    """A special token, which is written as its text or as an object."""
    if isinstance(value, str) and value:
        return NamedToken(value, special=True, normalized=False)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str) and value["content"]:
        return _of_object(value, special=True)
    return None


def _of_object(value: Mapping[str, Any], special: bool) -> NamedToken:
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
        tokens = [_of_object(entry, bool(entry.get("special"))) for entry in ordered]
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
