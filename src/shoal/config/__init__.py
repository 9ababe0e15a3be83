"""Configuration: YAML files and flags with the same keys, read into the option dataclasses of other packages.

This package parses YAML and flags, validates values, and raises errors with their place and the possible
values. The options themselves, with defaults and meaning, are in the packages that use them. The command line
is in ``cli``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.config.flags import (
    CLUSTER_FLAGS,
    ENGINE_FLAGS,
    MODEL_FLAGS,
    RENAMED_FLAGS,
    SERVER_FLAGS,
    Flag,
    flag_settings,
)
from shoal.core.units import format_duration, format_size, parse_duration, parse_number, parse_size

if TYPE_CHECKING:
    from shoal.config.presets import PRESETS, Preset
    from shoal.config.scenario import Scenario
    from shoal.config.scenario_file import load_scenario, scenario_section
    from shoal.config.scenario_run import PreparedRun, prepare
    from shoal.config.settings import Config, config_section, load_config

__all__ = [
    "CLUSTER_FLAGS",
    "ENGINE_FLAGS",
    "MODEL_FLAGS",
    "PRESETS",
    "RENAMED_FLAGS",
    "SERVER_FLAGS",
    "Config",
    "Flag",
    "PreparedRun",
    "Preset",
    "Scenario",
    "config_section",
    "flag_settings",
    "format_duration",
    "format_size",
    "load_config",
    "load_scenario",
    "parse_duration",
    "parse_number",
    "parse_size",
    "prepare",
    "scenario_section",
]

_LAZY = {
    "Config": "settings",
    "config_section": "settings",
    "load_config": "settings",
    "PRESETS": "presets",
    "Preset": "presets",
    "Scenario": "scenario",
    "load_scenario": "scenario_file",
    "scenario_section": "scenario_file",
    "PreparedRun": "scenario_run",
    "prepare": "scenario_run",
}
"""Module of each name that is imported on first use."""


def __getattr__(name: str) -> Any:
    # ``settings`` imports every package with options; flags and units alone are quick to import.
    if name not in _LAZY:
        raise AttributeError(f"module 'shoal.config' has no attribute {name!r}")
    return getattr(import_module(f"shoal.config.{_LAZY[name]}"), name)
