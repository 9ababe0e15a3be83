"""The simulator: runs the real manager, engine, scheduler and block pools on a virtual clock.

It has the clock, the event loop, arrivals, and the records of a run. ``forecast`` gives the duration of a
step, and ``measure`` evaluates the records.
"""

from shoal.simulate.kv_shape import kv_shape
from shoal.simulate.overhead_fit import OverheadFit, fit_overhead
from shoal.simulate.simulation import Simulation
from shoal.simulate.sources import ClosedLoop, OpenLoop, Source
from shoal.simulate.spec import Deaths, EngineSpec, MigrationSpec, ServiceSpec, Watch, token_layout

__all__ = [
    "ClosedLoop",
    "Deaths",
    "EngineSpec",
    "MigrationSpec",
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
