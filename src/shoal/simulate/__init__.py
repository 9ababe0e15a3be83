"""Serving on a virtual clock, with the code that serves for real.

Here belong the clock, the heap of events, arrivals, and the records of a simulated run. Decisions are made
by the rooms below (``cluster``, ``engine``, ``schedule``, ``kvcache``), which are run and not copied;
``forecast`` says how long a step takes, and ``measure`` evaluates the records.
"""

from shoal.simulate.kv_shape import kv_shape
from shoal.simulate.overhead_fit import OverheadFit, fit_overhead
from shoal.simulate.simulation import Simulation
from shoal.simulate.sources import ClosedLoop, OpenLoop, Source
from shoal.simulate.spec import Deaths, EngineSpec, Moving, ServiceSpec, Watch, token_layout

__all__ = [
    "ClosedLoop",
    "Deaths",
    "EngineSpec",
    "Moving",
    "OpenLoop",
    "OverheadFit",
    "ServiceSpec",
    "Simulation",
    "Source",
    "Watch",
    "fit_overhead",
    "kv_shape",
    "token_layout",
]
