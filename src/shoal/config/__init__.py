"""Configuration: one YAML file and the same keys as flags, read into the rooms' own option dataclasses.

Here belong units, the reading of YAML and flags, checks of what was written, and the errors that say
where and what is possible. Options themselves, with their defaults and meaning, belong to the rooms
that read them; the command line's look belongs to ``cli``.
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

_LATER = {
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
"""Where names are that are imported when they are asked for."""


def __getattr__(name: str) -> Any:
    # The settings import every room that has options; flags and units alone stay quick to import.
    if name not in _LATER:
        raise AttributeError(f"module 'shoal.config' has no attribute {name!r}")
    return getattr(import_module(f"shoal.config.{_LATER[name]}"), name)
