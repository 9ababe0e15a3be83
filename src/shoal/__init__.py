"""Shoal serves many LLMs on few devices.

``from shoal import Shoal, Service, SamplingParams`` is the offline interface; ``shoal serve`` is the
HTTP one. Importing this package is cheap: torch is loaded only when an engine is built.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.core import (
        SLO,
        ConfigError,
        Grammar,
        GrammarKind,
        InvalidRequest,
        SamplingParams,
        Service,
        ShoalError,
    )
    from shoal.frontend.offline_api import Shoal

__all__ = [
    "SLO",
    "ConfigError",
    "Grammar",
    "GrammarKind",
    "InvalidRequest",
    "SamplingParams",
    "Service",
    "Shoal",
    "ShoalError",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Shoal":
        from shoal.frontend.offline_api import Shoal

        return Shoal
    if name in __all__:
        import shoal.core

        return getattr(shoal.core, name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
