"""What an engine process is started with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.engine.options import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine process is started with; it is pickled."""

    options: EngineOptions
    """What the engine is built from."""
    folders: Mapping[str, Path]
    """Where the model of each service lies, by service name."""
    builder: str
    """"module:function" with the signature of ``build_engine``."""
    heartbeat_s: float
    """It gives a sign of life so often."""
