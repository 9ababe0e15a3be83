"""``build_engine`` for a process of its own: importing this module imports all that an engine computes with.

So the process knows when that is done, and that nothing of it will ever be garbage.
"""

import shoal.execute.model.loading
import shoal.execute.services
import shoal.execute.torch_executor  # noqa: F401
from shoal.engine.build import build_engine

__all__ = ["build_engine"]
