"""Workloads: traces, arrival processes and length distributions, and the requests they make.

Here belong readers of trace formats (one small file each, entered in ``readers.FORMATS``), processes that
say when requests come, distributions that say how long they are, and ``build_requests``, which makes
requests of a scenario's ``WorkloadOptions``. Everything is keyed by a seed. Not here: anything that runs
requests (the closed loop is the simulator's), estimates of traffic (``forecast``), parsing of YAML
(``config``).
"""

from shoal.workload.arrivals import (
    ARRIVALS,
    ArrivalProcess,
    AtOnce,
    Gamma,
    Poisson,
    Replay,
    Uniform,
    Weibull,
    weibull_shape,
)
from shoal.workload.distributions import (
    SIDE_DISTRIBUTIONS,
    Concatenation,
    Empirical,
    FixedLength,
    GammaLength,
    Independent,
    LengthDistribution,
    LogNormalLength,
    Mixture,
    MixtureLength,
    SideDistribution,
    UniformLength,
)
from shoal.workload.mooncake import write_mooncake
from shoal.workload.options import Workload, WorkloadOptions, build_requests, build_workload, deal
from shoal.workload.prefixes import block_hashes
from shoal.workload.presets import LENGTHS
from shoal.workload.readers import FORMATS, Trace, TraceFormat, guess_format, load_trace, read_trace
from shoal.workload.request_logs import read_measured
from shoal.workload.requests import generate_rows, to_requests, with_arrivals, with_lengths
from shoal.workload.rows import TraceRow, in_order

__all__ = [
    "ARRIVALS",
    "FORMATS",
    "LENGTHS",
    "SIDE_DISTRIBUTIONS",
    "ArrivalProcess",
    "AtOnce",
    "Concatenation",
    "Empirical",
    "FixedLength",
    "Gamma",
    "GammaLength",
    "Independent",
    "LengthDistribution",
    "LogNormalLength",
    "Mixture",
    "MixtureLength",
    "Poisson",
    "Replay",
    "SideDistribution",
    "Trace",
    "TraceFormat",
    "TraceRow",
    "Uniform",
    "UniformLength",
    "Weibull",
    "Workload",
    "WorkloadOptions",
    "block_hashes",
    "build_requests",
    "build_workload",
    "deal",
    "generate_rows",
    "guess_format",
    "in_order",
    "load_trace",
    "read_measured",
    "read_trace",
    "to_requests",
    "weibull_shape",
    "with_arrivals",
    "with_lengths",
    "write_mooncake",
]
