"""Serving on a virtual clock, with the code that serves for real.

Here belong the clock, the heap of events, arrivals, dispatch over several engines, and the records of a
simulated run. Decisions are made by the rooms below (``engine``, ``schedule``, ``kvcache``), which are run
and not copied; ``forecast`` says how long a step takes, and ``measure`` evaluates the records.
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
