"""Builders for configuration tests."""

from dataclasses import dataclass
from pathlib import Path

from shoal.config import Config, Scenario, flag_settings, load_config, load_scenario
from shoal.config.setting_tree import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Replaces the HTTP server's option dataclass, which ``config`` may not import."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0


def from_yaml(folder: Path, text: str, **flags: str | bool) -> Config[HttpOptions]:
    """The configuration in a file with ``text``, under flags given as Python names."""
    file = folder / "shoal.yaml"
    file.write_text(text)
    return load_config(HttpOptions, file=file, flags=settings(**flags) if flags else None)


def from_flags(*models: str, services: tuple[str, ...] = (), **flags: str | bool) -> Config[HttpOptions]:
    """The configuration of flags alone."""
    return load_config(HttpOptions, flags=settings(*models, services=services, **flags))


def settings(*models, services=(), **flags):
    values = {name.replace("_", "-"): value for name, value in flags.items()}
    return flag_settings(values, models=models, services=services)


def scenario(folder: Path, text: str, flags: Table | None = None) -> Scenario:
    """The scenario in a file with ``text``, under ``flags``."""
    file = folder / "scenario.yaml"
    file.write_text(text)
    return load_scenario(file=file, flags=flags)
