"""Ablation of SeaLLM: without its order, its placement or its re-placement (Fig. 8)."""

from experiments.parallel import map_points
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row
from experiments.seallm.changing_traffic import Run, measure
from experiments.seallm.end_to_end import ASSUMPTIONS, DEVICES, factors
from experiments.seallm.group_runs import PAPER
from experiments.seallm.services import Traffic
from shoal.place.re_placement import IntervalRule

NAME = "seallm-ablation"
PHASE_S, QUICK_PHASE_S = 60.0, 6.0
RATES, QUICK_RATES = (10.0, 30.0, 50.0), (6.0,)
MEMORY = 0.6
PAPER_FACTORS = {
    "seallm-f": {"latency_factor": 4.17, "attainment_factor": 1.37},
    "seallm-m": {"latency_factor": 4.17, "attainment_factor": 1.37},
    "seallm-p": {},
    "seallm-a": {"latency_factor": 2.44, "attainment_factor": 1.33},
}
"""Largest factors of SeaLLM over its variants in Fig. 8, the same for the first two."""

DIFFERS = (
    "Variants: seallm-f is FCFS, seallm-m FastServe's order, each with its own placement by our search; "
    "seallm-p shares nothing (an even split); seallm-a is never re-placed. Services are placed for a first "
    "minute, and then serve two more; their popularity changes every minute (correlation 0.6). All but "
    "seallm-p and seallm-a are re-placed after a minute if it pays (`seallm-replacement`).",
)


def run(effort: Effort) -> Result:
    phase_s = effort.choose(PHASE_S, QUICK_PHASE_S)
    rule = IntervalRule(first_s=phase_s, least_s=phase_s / 2, most_s=2 * phase_s)
    points = []
    for rate in effort.choose(RATES, QUICK_RATES):
        traffic = Traffic(rate, phase_s, phases=3, memory=MEMORY)
        for name in ("seallm", *PAPER_FACTORS):
            fixed = name in ("seallm-p", "seallm-a")
            system = "seallm" if name == "seallm-a" else name
            points.append((name, Run(system, traffic, "never" if fixed else "hysteresis", DEVICES, rule)))
    found = map_points(
        effort, NAME, measure, [run for _, run in points], heaviest_first=lambda run: run.traffic.rate
    )
    rows = [
        Row(config={"system": name, "rate": run.traffic.rate, "against": None}, metrics=metrics)
        for (name, run), metrics in zip(points, found, strict=True)
    ]
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 8",
        assumptions=[*(line for line in ASSUMPTIONS if "no service is re-placed" not in line), *DIFFERS],
        rows=[*rows, *factors(rows, ["seallm"], PAPER_FACTORS)],
        panels=[
            [
                line_panel(
                    rows, x="rate", y=metric, by="system", where={}, x_label="requests/s", y_label=label
                )
                for metric, label in (
                    ("normalised_latency", "mean latency / L^"),
                    ("slo_attainment", "share within 5 L^"),
                )
            ]
        ],
    )


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SeaLLM, Fig. 8",
    measures="latency and SLO attainment without parts of SeaLLM's design",
    run=run,
)
