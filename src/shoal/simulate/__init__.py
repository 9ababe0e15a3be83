"""Serving on a virtual clock: the code that serves for real, with time that costs nothing.

Here belong the clock, the heap of events, arrivals, dispatch over several engines, and what a simulated run
leaves behind. Decisions are made by the rooms below (``engine``, ``schedule``, ``kvcache``), which are driven
and not copied; how long a step takes is asked of ``forecast``; what the figures mean is said in ``measure``.
"""

from shoal.simulate.dispatch import (
    DISPATCHES,
    Dispatch,
    EngineView,
    LeastLoaded,
    RoundRobinDispatch,
    dispatch_named,
)
from shoal.simulate.simulation import Simulation
from shoal.simulate.sources import ClosedLoop, OpenLoop, Source
from shoal.simulate.spec import EngineSpec, ServiceSpec, Watch, token_layout

__all__ = [
    "DISPATCHES",
    "ClosedLoop",
    "Dispatch",
    "EngineSpec",
    "EngineView",
    "LeastLoaded",
    "OpenLoop",
    "RoundRobinDispatch",
    "ServiceSpec",
    "Simulation",
    "Source",
    "Watch",
    "dispatch_named",
    "token_layout",
]
