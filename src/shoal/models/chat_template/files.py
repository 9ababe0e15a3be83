"""Reading chat templates from a model's files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core import ModelUnavailable
from shoal.models.folder.json_files import read_json

DEFAULT = "default"
TOOL_USE = "tool_use"
"""Template for conversations with tools."""


def read_templates(folders: Sequence[Path]) -> dict[str, str]:
    """Jinja sources by template name in ``folders``, which belong to one model.

    A template in its own file has priority over one of the same name in a JSON file. Raises ModelUnavailable
    if a file is not UTF-8 text.
    """
    templates: dict[str, str] = {}
    for find in (_of_files, _of_json):
        for folder in folders:
            for name, source in find(folder):
                templates.setdefault(name, source)
    return templates


def _of_json(folder: Path) -> Iterator[tuple[str, str]]:
    for file in ("tokenizer_config.json", "chat_template.json"):
        yield from _named(read_json(folder / file).get("chat_template"))


def _named(template: Any) -> Iterator[tuple[str, str]]:
    """(name, source) of one template, or of a list of objects with names."""
    if isinstance(template, str) and template:
        yield DEFAULT, template
    elif isinstance(template, list):
        for entry in template:
            named = entry if isinstance(entry, Mapping) else {}
            if isinstance(named.get("name"), str) and isinstance(named.get("template"), str):
                yield named["name"], named["template"]


def _of_files(folder: Path) -> Iterator[tuple[str, str]]:
    if (file := folder / "chat_template.jinja").is_file():
        yield DEFAULT, _text(file)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        if file.is_file():
            yield file.stem, _text(file)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise ModelUnavailable(f"{file} is no text in UTF-8: {error}") from error
