"""SeaLLM's main figures: 16 services on 32 A800 at rising load, against other systems (Figs. 6, 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.factors import largest_factors
from experiments.parallel import at_each
from experiments.pictures import lines
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.seallm.points import PAPER
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
"""Section 6.2: how many times better SeaLLM is, at most."""
_FACTOR_OF = {"latency_factor": "normalised_latency", "p99_factor": "p99", "ttft_factor": "ttft"}

ASSUMPTIONS = (
    "From the paper: 4 nodes of 8 A800, Llama-2 7B, 13B, 70B and OPT-6.7B, at most two services in a "
    "group, goals of 5 L^, 2 to 50 requests/s.",
    "16 services: 10 clusters of ShareGPT's lengths and 6 of LongBench's (k-means), each with a model by "
    "lot. ShareGPT's lengths are our fit, LongBench's lognormal, with Table 1's means, cut at 4,096 "
    "tokens of context, also for OPT.",
    "The MAF trace cannot be had as a whole. Stand-in: the services' popularities are lognormal "
    "(deviation 1 of the logarithm), and change between two minutes (correlation 0.9); times between a "
    "service's requests are gamma-distributed with a coefficient of variation of 3.",
    "Every system places services for the first minute and serves the second, from an idle start, until "
    "all is answered; nothing is placed anew meanwhile. Latencies are in units of L^, the time that the "
    "service's mean request takes alone on one device (Eq. 7), the same for all; p99 too.",
    "vllm: devices are split evenly, first come first served. alpaserve: its greedy placement, oldest "
    "request first. muxserve: its greedy placement in outline, of group sizes at which it shares (free to "
    "choose, it shares nothing here and is vllm); services of a group have fixed halves of it. seallm: "
    "our search with the order seallm-join; shoal: our search with our default scheduler; "
    "seallm-literal: Algorithm 1 and the order as printed.",
    "Placements are searched with formulas, the best of them simulated; every service shall have half of "
    "its requests within their goals first (Eq. 5), but in Algorithm 1 as printed, which may leave "
    "services out. What no engine serves is refused and has missed its goal.",
    "Step times: a roofline of the A800 with factors fitted to A100 kernels, its NVLink between devices.",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One system under one load."""

    system: str
    """Its name."""
    traffic: Traffic
    """What arrives, in two phases: one to place for, one to serve."""
    devices: int = DEVICES
    """Of the cluster."""


def measure(point: Point) -> dict[str, Value]:
    """Place for the first phase, serve the second."""
    system = SYSTEMS[point.system]
    before, now = phases(point.traffic)
    found = Placer(system, point.devices).place(before, point.traffic.phase_s)
    return {
        **figures(serve(system, found.placement, now)),
        "groups": sum(bool(group.shares) for group in found.placement.groups),
        "shared": sum(len(group.services) > 1 for group in found.placement.groups),
    }


def run(effort: Effort) -> Result:
    """Every rate under every system, then the largest factors."""
    phase_s = effort.choose(PHASE_S, QUICK_PHASE_S)
    points = [
        Point(system, Traffic(rate, phase_s))
        for rate in effort.choose(RATES, QUICK_RATES)
        for system in effort.choose(COMPARED, QUICK_COMPARED)
    ]
    found = at_each(effort, NAME, measure, points, heaviest_first=lambda point: point.traffic.rate)
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
    """How many times better ours are than each baseline, at the rate where that is most.

    papers: by baseline, what the paper says of the same factors.
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
        lines(rows, x="rate", y=metric, by="system", where={}, x_label="requests/s", y_label=label)
        for metric, label in shown.items()
    ]


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SeaLLM, Figs. 6 and 7",
    says="latency, p99, goals kept, TTFT and TPOT of 16 services on 32 devices, against other systems",
    run=run,
)
