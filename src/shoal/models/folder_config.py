"""Reading the small JSON files of a Hugging Face folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core import ModelUnavailable


def read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``, {} where there is no such file; raises ModelUnavailable where it is broken."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelUnavailable(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{file} holds no JSON object")
    return content


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model; multimodal ones nest it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def eos_from_configs(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: from generation_config.json, else from config.json, else none."""
    generation = read_json(folder / "generation_config.json")
    for config in (generation, text_config(read_json(folder / "config.json"))):
        found = config.get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(int(token) for token in found)
    return ()
