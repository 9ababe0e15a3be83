"""One engine: scheduler, KV pool and executor, assembled and driven step by step.

This package has the synchronous core, the engine ``process`` with its wire protocol, and the ``migration`` of
requests between engines. ``schedule`` decides which request runs when, ``execute`` computes tokens,
``frontend`` turns them into text, and ``cluster`` manages many engines. Importing this package is cheap, and
importing all of its names does not import torch.
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
"""Module of each public name, imported on first use."""


def __getattr__(name: str) -> Any:
    # Most modules need numpy, which processes that only own engines should not import.
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.engine' has no attribute {name!r}")
    return getattr(import_module(f"shoal.engine.{_MODULES[name]}"), name)
