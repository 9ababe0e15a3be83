"""SLO attainment of SeaLLM's sharing group against how strict the goals are (Fig. 10)."""

from dataclasses import replace

from experiments.pictures import lines
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row
from experiments.seallm.cluster import SYSTEMS
from experiments.seallm.points import ASSUMPTIONS, PAPER, UNDRAWN, Point, coloured, measure_all
from experiments.seallm.workload import Traffic
from shoal.measure import Panel

NAME = "seallm-slo-scale"
SCALES = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0)
RATES = (4.0, 16.0)
SECONDS, QUICK_SECONDS = 20.0, 2.0

DIFFERS = (
    "The paper prints no number for Fig. 10, only that SeaLLM's attainment is the highest at every scale."
    " No system here looks at the goals, so one run gives the attainment at all scales.",
)


def run(effort: Effort) -> Result:
    """One run for each rate and system, read at every scale."""
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    rates = effort.choose(RATES, RATES[1:])
    points = [Point("chats", system, Traffic(rate, seconds)) for rate in rates for system in SYSTEMS]
    rows = [
        Row(
            config={"rate": point.traffic.rate, "scheduler": point.system, "scale": scale},
            metrics={"slo_attainment": found.attainment(scale)},
        )
        for point, found in zip(points, measure_all(NAME, points, effort), strict=True)
        for scale in SCALES
    ]
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 10",
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=rows,
        panels=[[_panel(rows, rate) for rate in rates]],
    )


def _panel(rows: list[Row], rate: float) -> Panel:
    panel = lines(
        [row for row in rows if row.config["scheduler"] != UNDRAWN],
        x="scale",
        y="slo_attainment",
        by="scheduler",
        where={"rate": rate},
        x_label="goal / L^",
        y_label="share within the goal",
        title=f"{rate:g} requests/s",
    )
    return replace(panel, series=coloured(panel.series), share=True, log_x=True)


REPRODUCTION = Reproduction(
    name=NAME, paper="SeaLLM, Fig. 10", says="SLO attainment against the scale of the goals", run=run
)
