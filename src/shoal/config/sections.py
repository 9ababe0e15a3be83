"""``Section``: reads an option dataclass from keys and values, with keys derived from its fields.

A key is the field's name without its unit (``memory_bytes`` is written ``memory``), and the field's type
determines its kind of value. So a new field of an option dataclass is a new key, without code here.

There are no pydantic models: units, labels, and errors with lines would still need code, and converting
pydantic's errors takes as much code as reading the values.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.setting_tree import Node, SettingError, problem
from shoal.config.value_kinds import (
    Choice,
    Kind,
    Maybe,
    Several,
    Switch,
    Text,
    as_table,
    hint,
    integer,
    nanoseconds,
    number,
    seconds,
    size,
)
from shoal.core import ShoalError

Rules = Mapping[tuple[type, str], Kind]
"""Kinds of fields whose type is not sufficient, by (dataclass, field)."""

_UNITS = {"_bytes": size, "_s": seconds, "_ns": nanoseconds}
_RATE = "_per_s"


class UnknownKey(SettingError):
    """An error: an unknown key of a section."""

    def __init__(self, message: str, path: str, key: str) -> None:
        super().__init__(message, path)
        self.key = key


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a section, and its field of the dataclass."""

    name: str
    field: str
    kind: Kind
    default: Any = dataclasses.MISSING
    """MISSING: the key is required."""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


@dataclass(frozen=True, slots=True)
class Section:
    """A kind of value: a dataclass as keys and values."""

    cls: type
    keys: tuple[Key, ...]
    """Keys of the fields that can be written."""
    label: str = "keys and values"
    """Name of this kind in the documentation."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keys of earlier versions, and their present names."""

    def read(self, node: Node, path: str) -> Any:
        """An instance of the dataclass; raises ConfigError for the first mistake."""
        return self.build(self.read_fields(node, path), node, path)

    def build(self, fields: dict[str, Any], node: Node, path: str) -> Any:
        """An instance with ``fields``; its own errors are raised with the place of the node."""
        try:
            return self.cls(**fields)
        except (ShoalError, ValueError) as error:
            raise problem(node.where, path, str(error)) from error

    def read_fields(self, node: Node, path: str) -> dict[str, Any]:
        """The written values, by field name."""
        table = as_table(node, path)
        by_name = {key.name: key for key in self.keys}
        prefix = f"{path}." if path else ""
        for name in table.entries:
            if name in self.renamed:
                place, new_name = table.key_places[name], self.renamed[name]
                raise problem(place, prefix + name, f"is now called {prefix}{new_name}")
            if name not in by_name:
                raise unknown_key(table.key_places[name], prefix + name, name, tuple(by_name))
        for key in self.keys:
            if key.required and key.name not in table.entries:
                raise problem(table.where, prefix + key.name, f"missing; write {key.kind.label}")
        return {
            by_name[name].field: by_name[name].kind.read(value, prefix + name)
            for name, value in table.entries.items()
        }

    def show(self, value: Any) -> str:
        """The keys and values of an instance that differ from the defaults."""
        shown = [
            f"{key.name}: {key.kind.show(getattr(value, key.field))}"
            for key in self.keys
            if key.required or getattr(value, key.field) != key.default
        ]
        return "{" + ", ".join(shown) + "}" if shown else "see its keys"

    def walk(self, path: str = "") -> Iterator[tuple[str, Key]]:
        """Yields every key below this section with its full path; sections themselves are not included."""
        for key in self.keys:
            full = f"{path}.{key.name}" if path else key.name
            kind = key.kind.inner if isinstance(key.kind, Maybe | Several) else key.kind
            if isinstance(kind, Section):
                yield from kind.walk(full + "[]" if isinstance(key.kind, Several) else full)
            else:
                yield full, key


def unknown_key(where: str, path: str, name: str, possible: tuple[str, ...]) -> UnknownKey:
    """The error for a key that is not in ``possible``, with a similar one."""
    near = hint(name, possible) or f"; possible here: {', '.join(possible)}"
    return UnknownKey(f"{where}: {path}: unknown key{near}", path, name)


def section_of(cls: type, rules: Rules, renamed: Mapping[str, str] | None = None) -> Section:
    """The section for dataclass ``cls``; renamed: keys by field, where they differ."""
    annotations = typing.get_type_hints(cls)
    keys = []
    for field in dataclasses.fields(cls):
        kind = rules.get((cls, field.name)) or _kind_of(annotations[field.name], field.name, rules)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        name = (renamed or {}).get(field.name) or key_name(field.name)
        keys.append(Key(name, field.name, kind, default))
    return Section(cls, tuple(keys))


def key_name(field: str) -> str:
    """A field's name without its unit; a rate keeps its unit."""
    unit = _unit_of(field)
    return field if unit is None else field.removesuffix(unit)


def _unit_of(field: str) -> str | None:
    """The suffix of a field's name that is the unit of a size or time, if any."""
    if field.endswith(_RATE):
        return None
    return next((suffix for suffix in _UNITS if field.endswith(suffix)), None)


def _kind_of(annotation: Any, name: str, rules: Rules) -> Kind:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) == 1 and len(arguments) == 2:
            return Maybe(_kind_of(inner[0], name, rules))
    if origin is typing.Literal:
        return Choice(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return Several(_kind_of(arguments[0], name, rules))
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return section_of(annotation, rules)
    unit = _unit_of(name)
    if unit is not None and annotation in (int, float):
        return _UNITS[unit]()
    kinds: dict[Any, Kind] = {bool: Switch(), int: integer(), float: number(), str: Text()}
    if annotation not in kinds:
        raise TypeError(f"no configuration kind for field {name} of type {annotation}")
    return kinds[annotation]
