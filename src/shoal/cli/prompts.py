"""Prompts from arguments, files and standard input."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core import ConfigError, InvalidRequest, sampling_params

_TUPLES = {"stop", "stop_token_ids"}


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt with its sampling parameters."""

    prompt: str | list[int]
    """Text or token ids."""
    sampling: Mapping[str, Any]
    """The parameters that the user set, by name."""


def collect_prompts(
    arguments: Sequence[str], file: str | None, sampling: Mapping[str, Any]
) -> list[PromptLine]:
    """Prompts from the command line, then from ``file``; from standard input if there is neither.

    A file named ``*.jsonl`` holds one JSON value per line: a string, a list of token ids, or an object
    with ``prompt`` and any sampling parameter. Any other file, and standard input (also ``-``), holds one
    prompt per line. Raises ConfigError with the number of the wrong line.
    """
    lines = [PromptLine(text, sampling) for text in arguments]
    if file is None and not lines and sys.stdin is not None and not sys.stdin.isatty():
        file = "-"
    if file is not None:
        lines += _read(file, sampling)
    if not lines:
        raise ConfigError(
            'no prompt: give one as an argument, as in `shoal generate --model smollm2 "Hello"`, '
            "or prompts with --file or on standard input"
        )
    return lines


def _read(file: str, sampling: Mapping[str, Any]) -> list[PromptLine]:
    try:
        text = _read_standard_input() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the prompts in {file}: not UTF-8 text") from error
    # Some editors begin a file with a byte-order mark.
    numbered = enumerate(text.removeprefix("\ufeff").splitlines(), 1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not file.endswith(".jsonl"):
        return [PromptLine(line, sampling) for _, line in lines]
    return [_parse(line, f"{file}, line {number}", sampling) for number, line in lines]


def _read_standard_input() -> str:
    """All of standard input; empty if the parent process closed it."""
    return "" if sys.stdin is None else sys.stdin.read()


def _parse(line: str, where: str, sampling: Mapping[str, Any]) -> PromptLine:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if isinstance(value, dict):
        return PromptLine(_prompt(value.get("prompt"), where), _override(sampling, value, where))
    return PromptLine(_prompt(value, where), sampling)


def _prompt(value: Any, where: str) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise ConfigError(
        f"{where}: expected a text, a list of token ids or an object with such a 'prompt', got {value!r:.60}"
    )


def _override(sampling: Mapping[str, Any], value: dict[str, Any], where: str) -> dict[str, Any]:
    changes = {key: item for key, item in value.items() if key != "prompt"}
    for key in _TUPLES & changes.keys():
        changes[key] = (changes[key],) if isinstance(changes[key], str) else tuple(changes[key])
    merged = {**sampling, **changes}
    try:
        sampling_params(merged)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error}") from error
    return merged
