"""One engine: scheduler, KV pool and executor put together.

Here belong the synchronous core, its ``process`` and wire protocol, and the ``migration`` of requests to and
from other engines. ``schedule`` decides which request runs when, ``execute`` computes tokens, ``frontend``
turns them into text, and ``cluster`` holds many engines. Importing this package is cheap, and importing all
of its names does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.engine.build import assemble_engine, build_engine
    from shoal.engine.core import Engine
    from shoal.engine.info import EngineInfo, ServiceInfo
    from shoal.engine.options import EngineOptions
    from shoal.engine.stats import EngineStats, ServiceStats

__all__ = [
    "Engine",
    "EngineInfo",
    "EngineOptions",
    "EngineStats",
    "ServiceInfo",
    "ServiceStats",
    "assemble_engine",
    "build_engine",
]

_MODULES = {
    "Engine": "core",
    "EngineInfo": "info",
    "EngineOptions": "options",
    "EngineStats": "stats",
    "ServiceInfo": "info",
    "ServiceStats": "stats",
    "assemble_engine": "build",
    "build_engine": "build",
}
"""Where names are; they are imported when they are asked for."""


def __getattr__(name: str) -> Any:
    # Most of it needs numpy, which the processes that only own engines do without.
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.engine' has no attribute {name!r}")
    return getattr(import_module(f"shoal.engine.{_MODULES[name]}"), name)
