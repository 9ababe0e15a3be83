"""``build_engine`` of engine processes: importing this module imports torch and all that an engine needs.

So the imports end at a known time, after which the process can exclude their objects from garbage collection.
"""

from shoal.engine.build import build_engine

__all__ = ["build_engine"]
