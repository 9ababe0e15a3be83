"""Workloads: traces, arrival processes, length distributions, and the requests built from them.

This package has readers of trace formats (one small file each, entered in ``readers.FORMATS``), arrival
processes, length distributions, and ``build_requests``, which makes requests from a scenario's
``WorkloadOptions``. All draws depend on a seed. It does not run requests (the closed loop is in the
simulator), estimate traffic (``forecast``), or parse YAML (``config``).
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
from shoal.workload.options import Workload, WorkloadOptions, assign_clients, build_requests, build_workload
from shoal.workload.prefixes import block_hashes
from shoal.workload.presets import LENGTHS
from shoal.workload.readers import FORMATS, Trace, TraceFormat, guess_format, load_trace, read_trace
from shoal.workload.request_logs import read_measured
from shoal.workload.requests import generate_rows, to_requests, with_arrivals, with_lengths
from shoal.workload.rows import TraceRow, sort_by_arrival

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
    "assign_clients",
    "generate_rows",
    "guess_format",
    "sort_by_arrival",
    "load_trace",
    "read_measured",
    "read_trace",
    "to_requests",
    "weibull_shape",
    "with_arrivals",
    "with_lengths",
    "write_mooncake",
]
