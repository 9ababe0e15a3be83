"""Configuration: one YAML file and the same keys as flags, read into the rooms' own option dataclasses.

Here belong units, the reading of YAML and flags, checks of what was written, and the errors that say
where and what is possible. Options themselves, with their defaults and meaning, belong to the rooms
that read them; the command line's look belongs to ``cli``.
"""

from typing import TYPE_CHECKING, Any

from shoal.config.flags import ENGINE_FLAGS, SERVER_FLAGS, Flag, flag_settings
from shoal.config.units import format_duration, format_size, parse_duration, parse_number, parse_size

if TYPE_CHECKING:
    from shoal.config.presets import PRESETS, Preset
    from shoal.config.settings import Config, config_section, load_config

__all__ = [
    "ENGINE_FLAGS",
    "PRESETS",
    "SERVER_FLAGS",
    "Config",
    "Flag",
    "Preset",
    "config_section",
    "flag_settings",
    "format_duration",
    "format_size",
    "load_config",
    "parse_duration",
    "parse_number",
    "parse_size",
]


def __getattr__(name: str) -> Any:
    # The settings import every room that has options; flags and units alone stay quick to import.
    if name in ("Config", "config_section", "load_config"):
        from shoal.config import settings

        return getattr(settings, name)
    if name in ("PRESETS", "Preset"):
        from shoal.config import presets

        return getattr(presets, name)
    raise AttributeError(f"module 'shoal.config' has no attribute {name!r}")
