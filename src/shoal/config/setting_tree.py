"""The tree of settings parsed from YAML or flags: scalars, lists and tables, each with its source place.

Scalars stay text until they are read as the kind of their key. So ``name: no`` is a name, flags and files are
read by the same code, and an error can quote what was written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.core import ConfigError

_PLAIN_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Scalar:
    text: str | None
    """As written; None: nothing or ``null``."""
    where: str
    """Source place, such as a file and line, or a flag."""


@dataclass(frozen=True, slots=True)
class Listing:
    items: "tuple[Node, ...]"
    where: str
    """Source place."""


@dataclass(frozen=True, slots=True)
class Table:
    entries: "Mapping[str, Node]"
    where: str
    """Source place."""
    key_places: Mapping[str, str]
    """Source place of each key."""


Node = Scalar | Listing | Table


class SettingError(ConfigError):
    """An error in a setting."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path
        """Dotted path of the key; "": the whole configuration."""


def below(path: str, key: str) -> str:
    """The path of ``key`` in the section at ``path``."""
    return f"{path}.{key}" if path else key


def problem(where: str, path: str, what: str) -> SettingError:
    """An error: ``what`` is wrong with the key at ``path``, written at ``where``."""
    return SettingError(": ".join(part for part in (where, path, what) if part), path)


def node_of(value: object, where: str) -> Node:
    """Parsed JSON as settings; where: the place in errors."""
    if isinstance(value, dict):
        entries = {str(key): node_of(inner, where) for key, inner in value.items()}
        return Table(entries, where, dict.fromkeys(entries, where))
    if isinstance(value, list):
        return Listing(tuple(node_of(inner, where) for inner in value), where)
    if isinstance(value, bool):
        return Scalar(str(value).lower(), where)
    return Scalar(None if value is None else str(value), where)


def plain_of(node: Node) -> Any:
    """Settings as plain JSON with texts, from which ``node_of`` makes the same settings."""
    if isinstance(node, Table):
        return {key: plain_of(inner) for key, inner in node.entries.items()}
    if isinstance(node, Listing):
        return [plain_of(inner) for inner in node.items]
    return node.text


def place_of(node: Node, *keys: str | int) -> str:
    """Source place of the innermost of ``keys`` that exists; a number is an index in a list."""
    where = node.where
    for key in keys:
        if isinstance(node, Table) and isinstance(key, str) and key in node.entries:
            where, node = node.key_places[key], node.entries[key]
        elif isinstance(node, Listing) and isinstance(key, int) and key < len(node.items):
            node = node.items[key]
            where = node.where
    return where


def describe(node: Node) -> str:
    """What was written, for an error message."""
    match node:
        case Scalar(text=None):
            return "nothing"
        case Scalar(text=text):
            return repr(text)
        case Listing():
            return "a list"
        case Table():
            return "a mapping"


def read_yaml(path: Path) -> Table:
    """The settings in a YAML file; raises ConfigError with the line of a mistake."""
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a configuration file; raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the configuration file {path}: it is not UTF-8 text") from error


def parse_yaml(text: str, source: str) -> Table:
    """The settings in YAML ``text``; source: its name in errors."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML: {error or 'nested too deeply'}") from error
    if root is None:
        return Table({}, source, {})
    node = _Converter(source).convert(root)
    if not isinstance(node, Table):
        raise problem(
            node.where, "", f"expected keys and values at the top of the file, got {describe(node)}"
        )
    return node


class _Converter:
    """Converts PyYAML nodes; each node once, so that aliases cost nothing and cannot loop."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._done: dict[int, Node] = {}
        self._open: set[int] = set()

    def convert(self, node: yaml.Node) -> Node:
        key = id(node)
        if key in self._open:
            raise problem(self._place(node), "", "this alias contains itself")
        if key not in self._done:
            self._open.add(key)
            self._done[key] = self._convert(node)
            self._open.discard(key)
        return self._done[key]

    def _convert(self, node: yaml.Node) -> Node:
        where = self._place(node)
        if not node.tag.startswith(_PLAIN_TAG):
            raise problem(where, "", f"the YAML tag {node.tag} means nothing here; write the value itself")
        if isinstance(node, yaml.ScalarNode):
            return Scalar(None if node.tag == f"{_PLAIN_TAG}null" else node.value, where)
        if isinstance(node, yaml.SequenceNode):
            return Listing(tuple(self.convert(item) for item in node.value), where)
        entries: dict[str, Node] = {}
        places: dict[str, str] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise problem(place, "", "expected a plain word as key")
            if key_node.value in entries:
                raise problem(place, key_node.value, f"written twice, first at {places[key_node.value]}")
            entries[key_node.value] = self.convert(value_node)
            places[key_node.value] = place
        return Table(entries, where, places)

    def _place(self, node: yaml.Node) -> str:
        return f"{self._source}, line {node.start_mark.line + 1}"
