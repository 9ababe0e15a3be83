"""EngineConfig: the options, model folders, builder and timeouts that an engine process is started with."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from shoal.core import Service
from shoal.engine.options import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine process; it is pickled."""

    options: EngineOptions
    folders: Mapping[str, Path]
    """Model folders by service name."""
    builder: str
    """"module:function" with the signature of ``build_engine``."""
    heartbeat_s: float
    """Time between heartbeats."""
    step_timeout_s: float = 30.0
    """Limit of ``HangDetector``."""

    def settings(self, name: str) -> dict[str, str]:
        """All values by dotted paths that begin with ``name``, to compare two configurations."""
        return _leaves(name, self)


def _leaves(name: str, value: object) -> dict[str, str]:
    own: dict[str, str] = {}
    if isinstance(value, Mapping):
        parts: Mapping[str, object] = {str(key): each for key, each in value.items()}
    elif isinstance(value, tuple) and value and all(isinstance(each, Service) for each in value):
        parts = {each.name: each for each in value}
    elif is_dataclass(value):
        own = {name: type(value).__name__}
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
    else:
        return {name: repr(value)}
    return own | {
        path: text for part, each in parts.items() for path, text in _leaves(f"{name}.{part}", each).items()
    }
