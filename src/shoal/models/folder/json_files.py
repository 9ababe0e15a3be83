"""Reading config.json and the other small JSON files of a Hugging Face folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core import ModelUnavailable


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``, {} if the file does not exist; raises ModelUnavailable if it is broken."""
    if not file.exists():
        return {}
    if not file.is_file():  # reading a pipe would block
        raise ModelUnavailable(f"{file} is no file")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelUnavailable(f"{file} is not valid JSON: {error}") from error
    except RecursionError:
        raise ModelUnavailable(f"{file} nests its values too deeply") from None
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{file} holds no JSON object")
    return content


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model; multimodal ones nest it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def size_of(config: Mapping[str, Any], *names: str) -> int:
    """The first value with one of these names that is a positive integer; raises KeyError if there is
    none."""
    for name in names:
        if is_size(config.get(name)):
            return int(config[name])
    raise KeyError(" or ".join(names))


def is_size(value: Any) -> bool:
    """Whether ``value`` is a positive integer."""
    return type(value) is int and value > 0
