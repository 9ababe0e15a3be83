"""One sharing group at rising load under every scheduler (SeaLLM, Figs. 6, 7 and 8)."""

from collections.abc import Mapping, Sequence

from experiments.factors import largest_factors
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.seallm.group_runs import ASSUMPTIONS, PAPER, Measured, Point, measure_all, panels
from experiments.seallm.sharing_group import SYSTEMS
from experiments.seallm.workload import Traffic
from shoal.measure import Panel

NAME = "seallm-schedulers"
SECONDS, QUICK_SECONDS = 20.0, 2.0
RATES: Mapping[str, tuple[float, ...]] = {
    "chats": (1.0, 4.0, 8.0, 16.0, 28.0),
    "chats+summaries": (3.0, 6.0, 10.0),
}
QUICK_RATES = {"chats": (4.0, 11.0)}
OURS = ("seallm", "seallm-join", "shoal")
SIDE = ("vllm", "alpaserve", "muxserve", "fcfs", "fastserve", "seallm", "seallm-join", "shoal")
"""Systems of the group ``chats+summaries``."""

FACTORS: Mapping[str, Mapping[str, Value]] = {
    "vllm": {"latency_factor": 10.38, "p99_factor": 12.13, "attainment_factor": 1.82},
    "alpaserve": {"latency_factor": 9.52, "p99_factor": 5.80, "attainment_factor": 3.64},
    "muxserve": {
        "latency_factor": 13.60,
        "p99_factor": 18.69,
        "attainment_factor": 2.11,
        "ttft_factor": 51.98,
    },
    "fcfs": {"latency_factor": 4.17, "attainment_factor": 1.37},
    "fastserve": {"latency_factor": 4.17, "attainment_factor": 1.37},
}
"""Largest factors of SeaLLM (section 6.2 and Fig. 8). The paper prints one number for its variants with FCFS
and MLFQ; the TTFT is against the worst system."""

DIFFERS = (
    "Differs: the factors over vllm and muxserve are far below the paper's. Both services of the group have "
    "the same rate and the work of about one GPU, so a dedicated GPU is rarely idle; in a cluster with "
    "unequally popular services it often is.",
    "Differs: seallm, the literal pseudocode, lets a batch drain before new requests join, and is worse than "
    "FCFS at light load; -join, where new requests join, has the paper's factors over alpaserve and fcfs.",
    "Differs: with long prompts (chats+summaries) -join falls behind fcfs: the execution time that it learns "
    "for summaries includes other prompts in the same steps, several times the time of one alone.",
)

_FACTOR_OF = {
    "latency_factor": "normalised_latency",
    "p99_factor": "normalised_latency_p99",
    "ttft_factor": "ttft_s",
}


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    points = [
        Point(group, system, Traffic(rate, seconds))
        for group, rates in effort.choose(RATES, QUICK_RATES).items()
        for rate in rates
        for system in (SYSTEMS if group == "chats" else SIDE)
    ]
    measured = measure_all(NAME, points, effort)
    rows = [
        Row(config=_config(point.group, point.system, point.traffic.rate), metrics=found.metrics)
        for point, found in zip(points, measured, strict=True)
    ]
    groups = list(dict.fromkeys(point.group for point in points))
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 6, 7 and 8",
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=[*rows, *(row for group in groups for row in _factors(group, points, measured))],
        panels=[_panels(rows, group) for group in groups],
    )


def _config(group: str, system: str, rate: float | None, against: str | None = None) -> dict[str, Value]:
    return {"group": group, "rate": rate, "scheduler": system, "against": against}


def _factors(group: str, points: Sequence[Point], measured: Sequence[Measured]) -> list[Row]:
    """The largest factors of ours over each baseline, over all rates."""
    found: dict[str, dict[float, Mapping[str, Value]]] = {}
    for point, measurement in zip(points, measured, strict=True):
        if point.group == group:
            found.setdefault(point.system, {})[point.traffic.rate] = measurement.metrics
    rows = []
    for ours in OURS:
        for baseline, paper in FACTORS.items():
            pairs = [(found[baseline][rate], metrics) for rate, metrics in found[ours].items()]
            metrics = largest_factors(pairs, _FACTOR_OF)
            rows.append(Row(config=_config(group, ours, None, baseline), metrics=metrics, paper=paper))
    return rows


def _panels(rows: Sequence[Row], group: str) -> list[Panel]:
    return panels(rows, "rate", "requests/s", {"group": group}, group)


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SeaLLM, Figs. 6, 7 and 8",
    measures="latency, SLO attainment, TTFT and TPOT of one sharing group at rising load, eleven schedulers",
    run=run,
)
