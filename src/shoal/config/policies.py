"""A policy chosen by name, with parameters of its own: ``{policy: past-future, reserved: 5%}``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.sections import Section
from shoal.config.setting_tree import Node, Scalar, Table, describe, problem
from shoal.config.value_kinds import Choice

NAME_KEY = "policy"


@dataclass(frozen=True, slots=True)
class Policy:
    """One of several dataclasses, each known by a name.

    Three spellings mean the same: a bare name, ``name:key=value,key=value`` (for flags), and a
    mapping with the name under ``name_key``.
    """

    sections: Mapping[str, Section]
    """The keys of each dataclass, by name."""
    name_key: str = NAME_KEY
    """The key of a mapping that has the name."""

    @property
    def label(self) -> str:
        """The names, or a mapping."""
        return f"{Choice(tuple(self.sections)).label}, or a mapping with `{self.name_key}`"

    def read(self, node: Node, path: str) -> Any:
        """An instance of the dataclass that the name stands for."""
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
        """The policy's name, with parameters where they differ from its defaults."""
        for name, section in self.sections.items():
            if type(value) is section.cls:
                parameters = section.show(value)
                return name if not parameters.startswith("{") else f"{name} {parameters}"
        return str(value)

    def _without_name(self, table: Table) -> Table:
        entries = {key: value for key, value in table.entries.items() if key != self.name_key}
        return Table(entries, table.where, table.key_places)


def parse_pairs(text: str, where: str, path: str) -> Table:
    """``key=value,key=value`` as keys and values; dots in a key go down one section each."""
    entries: dict[str, Node] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise problem(where, path, f"expected key=value, got {pair!r}")
        put(entries, key.strip().split("."), Scalar(value.strip(), where), path)
    return Table(entries, where, dict.fromkeys(entries, where))


def put(entries: dict[str, Node], keys: list[str], value: Node, path: str) -> None:
    """Set ``value`` under nested ``keys``; raises ConfigError where it was set before."""
    first, rest = keys[0], keys[1:]
    held = entries.get(first)
    if not rest:
        if held is not None:
            raise problem(value.where, path, f"the key '{first}' is written twice")
        entries[first] = value
        return
    if held is not None and not isinstance(held, Table):
        raise problem(value.where, path, f"the key '{first}' is written twice")
    inner = dict(held.entries) if isinstance(held, Table) else {}
    put(inner, rest, value, path)
    entries[first] = Table(inner, value.where, dict.fromkeys(inner, value.where))
