"""16 services on 32 A800 at rising load, SeaLLM's main result against other systems (Figs. 6 and 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.factors import largest_factors
from experiments.parallel import map_points
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.seallm.group_runs import PAPER
from experiments.seallm.services import Traffic, phases
from experiments.seallm.systems import SYSTEMS, Placer, figures, serve
from shoal.measure import Panel

NAME = "seallm-end-to-end"
DEVICES = 32
PHASE_S, QUICK_PHASE_S = 60.0, 8.0
RATES, QUICK_RATES = (2.0, 10.0, 20.0, 35.0, 50.0), (10.0,)
COMPARED = ("vllm", "alpaserve", "muxserve", "seallm-literal", "seallm", "shoal")
QUICK_COMPARED = ("vllm", "alpaserve", "muxserve", "seallm", "shoal")
OURS = ("seallm", "shoal")

FACTORS: Mapping[str, Mapping[str, Value]] = {
    "vllm": {"latency_factor": 10.38, "p99_factor": 12.13, "attainment_factor": 1.82},
    "alpaserve": {"latency_factor": 9.52, "p99_factor": 5.80, "attainment_factor": 3.64},
    "muxserve": {
        "latency_factor": 13.60,
        "p99_factor": 18.69,
        "attainment_factor": 2.11,
        "ttft_factor": 51.98,
    },
}
"""Largest factors of SeaLLM over other systems (section 6.2)."""
_FACTOR_OF = {"latency_factor": "normalised_latency", "p99_factor": "p99", "ttft_factor": "ttft"}

ASSUMPTIONS = (
    "From the paper: 4 nodes of 8 A800, Llama-2 7B, 13B, 70B and OPT-6.7B, at most two services in a "
    "group, SLOs of 5 L^, 2 to 50 requests/s.",
    "16 services: 10 clusters of ShareGPT's lengths and 6 of LongBench's (k-means), each with a random "
    "model. ShareGPT's lengths are our fit, LongBench's lognormal, with Table 1's means, cut at 4,096 "
    "tokens of context, also for OPT.",
    "The MAF trace is not completely public. Instead the services' popularities are lognormal (deviation 1 "
    "of the logarithm), and change between two minutes (correlation 0.9); times between a service's "
    "requests are gamma-distributed with a coefficient of variation of 3.",
    "Every system places services for the first minute and serves the second, from an idle start, until "
    "all requests are answered; no service is re-placed. Latencies and their p99 are in units of L^, the "
    "time of the service's mean request alone on one device (Eq. 7), the same for all systems.",
    "vllm: devices are split evenly, FCFS. alpaserve: its greedy placement, oldest request first. muxserve: "
    "its greedy placement in outline, limited to group sizes with sharing (otherwise it shares nothing here "
    "and equals vllm); services of a group have fixed halves of it. seallm: "
    "our search with the order seallm-join; shoal: our search with our default scheduler; "
    "seallm-literal: Algorithm 1 and the order as printed.",
    "Placements are searched with formulas, and the best are simulated; first, half of each service's "
    "requests must meet their SLO (Eq. 5), except in Algorithm 1 as printed, which may leave services out. "
    "Requests without an engine are refused and count as missed SLOs.",
    "Step times: a roofline of the A800 with factors fitted to A100 kernels, its NVLink between devices.",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One system under one load."""

    system: str
    traffic: Traffic
    """Two phases: services are placed for the first, and serve the second."""
    devices: int = DEVICES


def measure(point: Point) -> dict[str, Value]:
    system = SYSTEMS[point.system]
    before, now = phases(point.traffic)
    found = Placer(system, point.devices).place(before, point.traffic.phase_s)
    return {
        **figures(serve(system, found.placement, now)),
        "groups": sum(bool(group.shares) for group in found.placement.groups),
        "shared": sum(len(group.services) > 1 for group in found.placement.groups),
    }


def run(effort: Effort) -> Result:
    phase_s = effort.choose(PHASE_S, QUICK_PHASE_S)
    points = [
        Point(system, Traffic(rate, phase_s))
        for rate in effort.choose(RATES, QUICK_RATES)
        for system in effort.choose(COMPARED, QUICK_COMPARED)
    ]
    found = map_points(effort, NAME, measure, points, heaviest_first=lambda point: point.traffic.rate)
    rows = [
        Row(config={"system": point.system, "rate": point.traffic.rate, "against": None}, metrics=metrics)
        for point, metrics in zip(points, found, strict=True)
    ]
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 6 and 7",
        assumptions=ASSUMPTIONS,
        rows=[*rows, *factors(rows, OURS, FACTORS)],
        panels=[_panels(rows)],
    )


def factors(rows: Sequence[Row], ours: Sequence[str], papers: Mapping[str, Mapping[str, Value]]) -> list[Row]:
    """The largest factors of ours over each baseline, over all rates.

    papers: by baseline, the same factors in the paper.
    """
    by_system: dict[Value, dict[Value, Mapping[str, Value]]] = {}
    for row in rows:
        by_system.setdefault(row.config["system"], {})[row.config["rate"]] = row.metrics
    found = []
    for name in ours:
        for baseline, paper in papers.items():
            pairs = [(by_system[baseline][rate], mine) for rate, mine in by_system[name].items()]
            metrics = largest_factors(pairs, _FACTOR_OF)
            config: dict[str, Value] = {"system": name, "rate": None, "against": baseline}
            found.append(Row(config=config, metrics=metrics, paper=paper))
    return found


def _panels(rows: Sequence[Row]) -> list[Panel]:
    shown = {
        "normalised_latency": "mean latency / L^",
        "p99": "p99 of latency / L^",
        "slo_attainment": "share within 5 L^",
        "ttft": "mean TTFT (s)",
        "tpot": "mean TPOT (s)",
    }
    return [
        line_panel(rows, x="rate", y=metric, by="system", where={}, x_label="requests/s", y_label=label)
        for metric, label in shown.items()
    ]


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SeaLLM, Figs. 6 and 7",
    measures="latency, SLO attainment, TTFT and TPOT of 16 services on 32 devices, against other systems",
    run=run,
)
