"""Reads a policy chosen by name, with its own parameters: ``{policy: past-future, reserved: 5%}``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.sections import Section
from shoal.config.setting_tree import Node, Scalar, Table, describe, problem
from shoal.config.value_kinds import Choice

NAME_KEY = "policy"


@dataclass(frozen=True, slots=True)
class Policy:
    """A kind of value: one of several dataclasses, chosen by name.

    Three spellings mean the same: a bare name, ``name:key=value,key=value`` (for flags), and a
    mapping with the name under ``name_key``.
    """

    sections: Mapping[str, Section]
    """The keys of each dataclass, by name."""
    name_key: str = NAME_KEY
    """The key of the name in a mapping."""

    @property
    def label(self) -> str:
        return f"{Choice(tuple(self.sections)).label}, or a mapping with `{self.name_key}`"

    def read(self, node: Node, path: str) -> Any:
        """An instance of the named dataclass."""
        names = Choice(tuple(self.sections))
        match node:
            case Table(entries=entries) if self.name_key in entries:
                name = names.read(entries[self.name_key], f"{path}.{self.name_key}")
                return self.sections[name].read(self._without_name(node), path)
            case Table():
                raise problem(
                    node.where, path, f"the key '{self.name_key}' must be one of {', '.join(self.sections)}"
                )
            case Scalar(text=text) if text is not None:
                written, _, parameters = text.partition(":")
                name = names.read(Scalar(written.strip(), node.where), path)
                return self.sections[name].read(parse_pairs(parameters, node.where, path), path)
            case _:
                raise problem(
                    node.where, path, f"expected {names.expected} or a mapping, got {describe(node)}"
                )

    def show(self, value: Any) -> str:
        """The policy's name, with the parameters that differ from its defaults."""
        for name, section in self.sections.items():
            if type(value) is section.cls:
                parameters = section.show(value)
                return name if not parameters.startswith("{") else f"{name} {parameters}"
        return str(value)

    def _without_name(self, table: Table) -> Table:
        entries = {key: value for key, value in table.entries.items() if key != self.name_key}
        return Table(entries, table.where, table.key_places)


def parse_pairs(text: str, where: str, path: str) -> Table:
    """Parse ``key=value,key=value``; each dot in a key begins a subsection."""
    entries: dict[str, Node] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise problem(where, path, f"expected key=value, got {pair!r}")
        put(entries, key.strip().split("."), Scalar(value.strip(), where), path)
    return Table(entries, where, dict.fromkeys(entries, where))


def put(entries: dict[str, Node], keys: list[str], value: Node, path: str) -> None:
    """Set ``value`` under nested ``keys``; raises ConfigError for a duplicate key."""
    first, rest = keys[0], keys[1:]
    existing = entries.get(first)
    if not rest:
        if existing is not None:
            raise problem(value.where, path, f"the key '{first}' is written twice")
        entries[first] = value
        return
    if existing is not None and not isinstance(existing, Table):
        raise problem(value.where, path, f"the key '{first}' is written twice")
    inner = dict(existing.entries) if isinstance(existing, Table) else {}
    put(inner, rest, value, path)
    entries[first] = Table(inner, value.where, dict.fromkeys(inner, value.where))
