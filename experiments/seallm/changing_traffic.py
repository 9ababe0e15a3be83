"""Runs of SeaLLM's cluster over several phases of traffic, with re-placement of services or without."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from experiments.result import Value
from experiments.seallm.services import Traffic, phases
from experiments.seallm.systems import SYSTEMS, Placer, engines_of
from shoal.core import Request
from shoal.place.estimate import Estimate
from shoal.place.re_placement import Hysteresis, IntervalRule
from shoal.simulate.changing_placement import ChangingCluster
from shoal.simulate.periodic_placement import Interval, serve_replacing
from shoal.simulate.simulated_groups import estimates_of_rows

REPLACES = ("never", "literal", "hysteresis")
"""When services are re-placed: never, after every interval (Eq. 8), or if it pays."""


@dataclass(frozen=True, slots=True)
class Run:
    """One system under changing traffic."""

    system: str
    traffic: Traffic
    """Services are placed for the first phase, and serve the later ones."""
    replaces: str
    """One of ``REPLACES``."""
    devices: int
    rule: IntervalRule
    """Length of intervals."""


def measure(run: Run) -> dict[str, Value]:
    """Simulate all phases but the first; latencies are in units of L^."""
    system, phase_s = SYSTEMS[run.system], run.traffic.phase_s
    first, *later = phases(run.traffic)
    begin_ns = round(phase_s * 1e9)
    requests = [
        replace(request, arrival_ns=request.arrival_ns - begin_ns) for phase in later for request in phase
    ]
    placer = Placer(system, run.devices)
    found = placer.place(first, phase_s)
    cluster = ChangingCluster(engines_of(system), found.placement, requests)
    intervals: list[Interval] = []
    if run.replaces == "never":
        cluster.run()
    else:
        hysteresis = Hysteresis() if run.replaces == "hysteresis" else None
        intervals = serve_replacing(cluster, requests, placer, found.estimate, run.rule, hysteresis)
    return {**_figures(cluster, requests), **_of_intervals(intervals)}


def _figures(cluster: ChangingCluster, requests: Sequence[Request]) -> dict[str, Value]:
    """Requests of services that never had an engine are unanswered, and count as missed SLOs."""
    rows = cluster.rows
    total = Estimate(estimates_of_rows(rows, cluster.services, cluster.execution_s)).total
    normalised = sorted(row.e2e_s / cluster.execution_s[row.service] for row in rows)
    return {
        "normalised_latency": total.normalised_latency,
        "p99": normalised[round(0.99 * (len(normalised) - 1))],
        "slo_attainment": (total.requests - total.unserved) / len(requests),
        "ttft": fmean(row.ttft_s for row in rows),
        "tpot": fmean(row.tpot_s for row in rows),
        "requests": len(requests),
        "unanswered": len(requests) - len(rows),
    }


def _of_intervals(intervals: Sequence[Interval]) -> dict[str, Value]:
    """Number of re-placements, loaded weights, and errors of the estimates."""
    if not intervals:
        return {"intervals": 0, "changes": 0, "loaded_gib": 0.0}
    return {
        "intervals": len(intervals),
        "changes": sum(interval.changed for interval in intervals),
        "loaded_gib": sum(interval.load_bytes for interval in intervals) / 2**30,
        "attainment_error": fmean(
            abs(interval.achieved.attainment - interval.estimated.attainment) for interval in intervals
        ),
        "latency_error": fmean(
            abs(interval.achieved.normalised_latency / interval.estimated.normalised_latency - 1)
            for interval in intervals
        ),
    }
