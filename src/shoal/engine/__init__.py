"""One engine: scheduler, KV pool and executor put together, and the interfaces to it.

Here belong the synchronous core, its process and wire protocol, detokenising and stop strings, and the
offline interface. ``schedule`` decides which request runs when, ``execute`` computes tokens, ``cluster`` holds
many engines, and ``serve`` speaks HTTP. Importing this package does not import torch.
"""

from shoal.engine.build import assemble_engine, build_engine
from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.engine.options import EngineOptions
from shoal.engine.reader import Delta
from shoal.engine.stats import EngineStats, ServiceStats
from shoal.engine.stream import Stream

__all__ = [
    "Delta",
    "Engine",
    "EngineInfo",
    "EngineOptions",
    "EngineStats",
    "ServiceInfo",
    "ServiceStats",
    "Stream",
    "assemble_engine",
    "build_engine",
]
