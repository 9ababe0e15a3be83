"""Writes scheduler options as YAML that is read back as the same options."""

from decimal import Decimal
from typing import Any

import yaml

from shoal.config.policies import NAME_KEY, Policy
from shoal.config.presets import PRESETS
from shoal.config.sections import Section
from shoal.config.setting_tree import Scalar
from shoal.config.settings import scheduler_section
from shoal.config.value_kinds import Kind, Maybe, OrWord
from shoal.core import ConfigError
from shoal.schedule import SchedulerOptions

_WIDTH = 120


def scheduler_settings(options: SchedulerOptions, preset: str) -> dict[str, Any]:
    """The section ``scheduler`` as plain values: the preset, and differences from it.

    Times and sizes have units. Policies of simulations, such as known output lengths, are written, too;
    servers reject them.
    """
    return {"preset": preset, **differences(options, PRESETS[preset].scheduler)}


def differences(options: SchedulerOptions, base: SchedulerOptions) -> dict[str, Any]:
    """The keys in which ``options`` differ from ``base``, as plain values."""
    return {
        key.name: plain(key.kind, getattr(options, key.field))
        for key in scheduler_section(offline=True).keys
        if key.field != "preset" and getattr(options, key.field) != getattr(base, key.field)
    }


def plain(kind: Kind, value: Any) -> Any:
    """A value as it is written under a key of that kind: text, a number, or a mapping."""
    if isinstance(kind, Maybe):
        return None if value is None else plain(kind.inner, value)
    if isinstance(kind, OrWord):
        return kind.word if kind.show(value) == kind.word else plain(kind.inner, value)
    if isinstance(kind, Policy):
        name, section = next((n, s) for n, s in kind.sections.items() if type(value) is s.cls)
        inner = plain_section(section, value)
        return {kind.name_key: name, **inner} if inner else name
    if isinstance(kind, Section):
        return plain_section(kind, value)
    text = kind.show(value)
    if not _reads_as(kind, text, value):
        text = f"{Decimal(repr(value)):f}"  # all digits, and no unit
    found = yaml.safe_load(text)
    if isinstance(found, bool):
        return found
    return found if isinstance(found, int | float) and str(found) == text else text


def plain_section(section: Section, value: Any) -> dict[str, Any]:
    """The keys of a section that differ from its defaults, as plain values."""
    return {
        key.name: plain(key.kind, getattr(value, key.field))
        for key in section.keys
        if key.required or getattr(value, key.field) != key.default
    }


def to_yaml(settings: dict[str, Any]) -> str:
    """Settings as YAML text; sections without subsections are in one line."""
    return yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=_WIDTH)


def in_words(options: SchedulerOptions, base: SchedulerOptions) -> str:
    """The differences in words: ``order edf, admission slice (tokens 32)``; "" for none."""
    return ", ".join(f"{name} {_words(value)}" for name, value in differences(options, base).items())


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, dict):
        return "null" if value is None else str(value)
    inner = ", ".join(f"{name} {_words(each)}" for name, each in value.items() if name != NAME_KEY)
    return f"{value[NAME_KEY]} ({inner})"


def _reads_as(kind: Kind, text: str, value: Any) -> bool:
    try:
        return bool(kind.read(Scalar(text, ""), "") == value)
    except ConfigError:
        return False
