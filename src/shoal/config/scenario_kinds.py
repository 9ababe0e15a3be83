"""Kinds of values in scenarios: paths, model shapes, length distributions, arrival processes, shares."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.policies import Policy
from shoal.config.sections import Section, section_of
from shoal.config.setting_tree import Node, Scalar, Table, describe, problem
from shoal.config.value_kinds import Choice, Kind, Maybe, Text, integer, number
from shoal.core import ConfigError
from shoal.forecast.model_spec import ModelSpec, find_model_spec, model_spec
from shoal.workload import ARRIVALS, LENGTHS, SIDE_DISTRIBUTIONS, FixedLength, Independent, Replay


def _read_shape(file: Path) -> ModelSpec:
    config = _read_json(file)
    try:
        return ModelSpec.from_config(config, file.resolve().parent.name)
    except (ConfigError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{file} describes no model: {error}") from error


@dataclass(frozen=True, slots=True)
class FilePath:
    """An existing file or folder."""

    folder: Path
    """Base of relative paths that are not in flags."""
    label: str = "path"

    def read(self, node: Node, path: str) -> Path:
        """The path; in a flag it is relative to the working directory."""
        text: str = Text().read(node, path)
        file = resolve_path(text, node.where, self.folder)
        if not os.path.exists(file):
            raise problem(node.where, path, f"there is no file or folder {file}")
        return file

    def show(self, value: Any) -> str:
        """The path."""
        return str(value)


def resolve_path(text: str, where: str, folder: Path) -> Path:
    """The path written at ``where``: in a flag it is relative to the working directory."""
    return (Path() if where.startswith("-") else folder) / Path(text).expanduser()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A known model by name, or a Hugging Face ``config.json`` or its folder."""

    folder: Path
    """Base of relative paths that are not in flags."""
    label: str = "model"

    def read(self, node: Node, path: str) -> ModelSpec:
        text: str = Text().read(node, path)
        file = resolve_path(text, node.where, self.folder)
        file = file / "config.json" if os.path.isdir(file) else file
        try:
            if file.suffix == ".json":
                return _read_shape(file)
            return find_model_spec(text) or model_spec(text)
        except ConfigError as error:
            raise problem(node.where, path, str(error)) from None

    def show(self, value: ModelSpec) -> str:
        """Its name."""
        return value.name


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: nests its values too deeply") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: expected an object with keys such as num_hidden_layers")
    return config


@dataclass(frozen=True, slots=True)
class SideLengths:
    """Lengths of prompts or outputs: a distribution by name, or a number for a constant length."""

    policy: Policy

    @property
    def label(self) -> str:
        """A number, or a distribution."""
        return f"whole number, or {self.policy.label}"

    def read(self, node: Node, path: str) -> Any:
        if isinstance(node, Scalar) and node.text is not None and node.text.isdecimal():
            return FixedLength(integer(1).read(node, path))
        return self.policy.read(node, path)

    def show(self, value: Any) -> str:
        return str(value.tokens) if isinstance(value, FixedLength) else self.policy.show(value)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A named distribution of both lengths, or one for prompts and one for outputs."""

    sides: Section
    label: str = "name, or mapping with `prompt` and `output`"

    def read(self, node: Node, path: str) -> Any:
        if isinstance(node, Table):
            return self.sides.read(node, path)
        return LENGTHS[Choice(tuple(LENGTHS)).read(node, path)]

    def show(self, value: Any) -> str:
        named = next((name for name, lengths in LENGTHS.items() if lengths == value), None)
        return named or (self.sides.show(value) if isinstance(value, Independent) else type(value).__name__)


def lengths_kind() -> Lengths:
    """The kind of ``workload.lengths``."""
    policy = Policy({name: section_of(cls, {}) for name, cls in SIDE_DISTRIBUTIONS.items()}, "distribution")
    side = SideLengths(policy)
    return Lengths(section_of(Independent, {(Independent, "prompt"): side, (Independent, "output"): side}))


def arrivals_kind() -> Policy:
    """The kind of ``workload.arrivals``: processes by name. The times of a replay come from the trace."""
    sections = {}
    for name, cls in ARRIVALS.items():
        rate: Kind = Maybe(number(above=0)) if cls is Replay else number(above=0)
        section = section_of(cls, {(cls, "rate"): rate, (Replay, "times"): Text()})
        sections[name] = Section(cls, tuple(key for key in section.keys if key.name != "times"))
    return Policy(sections, "process")


class Shares:
    """Shares of services, by name."""

    label = "mapping of services to shares"

    def read(self, node: Node, path: str) -> dict[str, float]:
        if not isinstance(node, Table):
            raise problem(node.where, path, f"expected services and their shares, got {describe(node)}")
        share: Kind = number(minimum=0)
        return {name: share.read(value, f"{path}.{name}") for name, value in node.entries.items()}

    def show(self, value: Mapping[str, float]) -> str:
        return "{" + ", ".join(f"{name}: {share:g}" for name, share in value.items()) + "}"
