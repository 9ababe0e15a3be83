"""Shoal serves many LLMs on few devices.

``from shoal import Shoal, Service, SamplingParams`` is the offline interface; ``shoal serve`` is the
HTTP one. Importing this package is cheap: torch is loaded only when an engine is built.
"""

from typing import TYPE_CHECKING, Any

from shoal.core import SLO, SamplingParams, Service

if TYPE_CHECKING:
    from shoal.engine.offline import Shoal

__all__ = ["SLO", "SamplingParams", "Service", "Shoal"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Shoal":
        from shoal.engine.offline import Shoal

        return Shoal
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
