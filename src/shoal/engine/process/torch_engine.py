"""``build_engine`` for a process of its own: importing this module imports all that an engine computes with.

So the process knows when that is done, and that nothing of it will ever be garbage.
"""

from shoal.engine.build import build_engine

__all__ = ["build_engine"]
