"""``build_engine`` of engine processes: importing this module imports torch and all that an engine needs.

So the imports end at a known time, after which the process can exclude their objects from garbage collection.
"""

from shoal.engine.build import build_engine
from shoal.execute import torch_executor, torch_services
from shoal.execute.model import model_set

PRELOADED = (model_set, torch_executor, torch_services)
"""Modules that ``build_engine`` imports only when it runs."""

__all__ = ["PRELOADED", "build_engine"]
