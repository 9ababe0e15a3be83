"""Runs of one sharing group of SeaLLM, in parallel, their metrics, assumptions and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.parallel import map_points
from experiments.pictures import line_panel
from experiments.result import Effort, Row, Value
from experiments.seallm.sharing_group import SLO_SCALE, SYSTEMS, simulate
from experiments.seallm.workload import Traffic
from shoal.measure import Panel, Series, summarise

PAPER = "SeaLLM (Zhao et al., 2025: Service-Aware and Latency-Optimized Resource Sharing for LLM Inference)"
COMPARED = ("vllm", "alpaserve", "muxserve", "fastserve", "seallm-join", "shoal")
"""Systems of the smaller experiments."""

ASSUMPTIONS = (
    "From the paper: A800 of 80 GB, tensor parallelism, at most two services in a group, Llama-2 7B and "
    "13B, services cut from a dataset by k-means of the lengths and given a random LLM, Table 1's mean "
    "lengths, SLOs of 5 times the execution time.",
    "One sharing group on two GPUs: shared, both models lie on both (tensor parallel); dedicated (vllm), "
    "each has one GPU. So all systems have the same GPUs. L^ is the time of a request of mean lengths alone "
    "on one GPU (Eq. 7), the same for all systems; with sharing, latency can therefore be below 1.",
    "chats: answers of ShareGPT in two clusters, the short ones on 7B, the long ones on 13B. ShareGPT's "
    "lengths are our fit of them, scaled to Table 1's means (73 and 427); outputs end at 2048 tokens. "
    "chats+summaries: all of them on 13B, LongBench's on 7B, lognormal with Table 1's means, prompts cut "
    "at Llama 2's context of 4096.",
    "Arrivals: the MAF trace is not completely public. Each service has gamma-distributed times between "
    "requests with a coefficient of variation of 3 for 20 s, and runs end when all are answered; every rate "
    "has the same draws, scaled, and all systems get the same requests.",
    "Step times: a roofline of the A800 with factors fitted to A100 kernels. KV gets 90% of the "
    "memory less the weights, in one merged pool; at most 256 requests run at once.",
    "muxserve: each service has a fixed half of the compute of both GPUs (its steps take twice as long) "
    "and of the KV memory, FCFS. round-robin: MuxServe's order, but in time and without its split KV.",
    "alpaserve: the service of the oldest request steps; fcfs: new prompts by age, and services' decodes "
    "alternate. seallm is the paper's pseudocode; -join, -batch and -c-mu are our readings; all learn "
    "execution times online.",
    "Differs: requests without a step for 10 s go first in fastserve, all seallm and shoal (SeaLLM has such "
    "a threshold but does not print it; FastServe promotes likewise), but not in the other systems.",
    "Differs: one group with a fixed placement, without effects of placement and re-placement; the paper's "
    "figures are of a cluster of 32 GPUs with both. Its factors are the largest over its rates, like ours.",
)


UNDRAWN = "seallm-batch"
"""Not in pictures: its line coincides with that of ``seallm-join``, and there are ten colours."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    group: str
    system: str
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run."""

    metrics: Mapping[str, Value]
    normalised: tuple[float, ...]
    """Latency / L^ of each request."""

    def attainment(self, scale: float) -> float:
        """Share of requests within ``scale`` times L^."""
        return sum(latency <= scale for latency in self.normalised) / len(self.normalised)


def measure(point: Point) -> Measured:
    run = simulate(point.group, point.system, point.traffic)
    found = summarise(run).overall
    normalised, ttft, tpot = found.normalised_latency, found.ttft_s, found.tpot_s
    gap = found.largest_gap_s
    assert normalised is not None
    assert ttft is not None
    metrics: dict[str, Value] = {
        "normalised_latency": normalised.mean,
        "normalised_latency_p99": normalised.p99,
        "slo_attainment": found.slo_attainment,
        "ttft_s": ttft.mean,
        "tpot_s": None if tpot is None else tpot.mean,
        "mtpot_s": None if gap is None else gap.mean,
        "mtpot_p99_s": None if gap is None else gap.p99,
        "itl_p99_s": None if found.inter_token_s is None else found.inter_token_s.p99,
        "requests": found.requests,
        "preemptions": found.preemptions,
    }
    return Measured(metrics, tuple(row.e2e_s / run.execution_s[row.service] for row in run.requests))


def measure_all(name: str, points: Sequence[Point], effort: Effort) -> list[Measured]:
    """Measurements of all points, in order; independent of the number of cores."""
    return map_points(effort, name, measure, points)


def panels(
    rows: Sequence[Row], x: str, x_label: str, where: Mapping[str, Value], title: str, *, log: bool = True
) -> list[Panel]:
    """Latency, attainment and TTFT over ``x``, a line for each system.

    log: logarithmic axes for times, and for ``x`` under a share.
    """
    shown = {
        "normalised_latency": "mean latency / L^",
        "normalised_latency_p99": "p99 of latency / L^",
        "ttft_s": "mean TTFT (s)",
        "slo_attainment": f"share within {SLO_SCALE:g} L^",
    }
    drawn = [row for row in rows if row.config[x] is not None and row.config["scheduler"] != UNDRAWN]
    found = []
    for metric, label in shown.items():
        panel = line_panel(
            drawn, x=x, y=metric, by="scheduler", where=where, x_label=x_label, y_label=label, title=title
        )
        share = metric == "slo_attainment"
        series = assign_colours(panel.series)
        found.append(replace(panel, series=series, share=share, log=log and not share, log_x=log and share))
    return found


def assign_colours(series: Sequence[Series]) -> list[Series]:
    """Give each system the same colour in all pictures."""
    colours = {name: number for number, name in enumerate(name for name in SYSTEMS if name != UNDRAWN)}
    return [replace(line, colour=colours[line.label]) for line in series]
