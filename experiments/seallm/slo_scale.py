"""SLO attainment of a sharing group against the scale of the SLOs (SeaLLM, Fig. 10)."""

from dataclasses import replace

from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row
from experiments.seallm.group_runs import ASSUMPTIONS, PAPER, UNDRAWN, Point, assign_colours, measure_all
from experiments.seallm.sharing_group import SYSTEMS
from experiments.seallm.workload import Traffic
from shoal.measure import Panel

NAME = "seallm-slo-scale"
SCALES = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0)
RATES = (4.0, 16.0)
SECONDS, QUICK_SECONDS = 20.0, 2.0

DIFFERS = (
    "The paper prints no number for Fig. 10, only that SeaLLM's attainment is the highest at every scale."
    " No system here uses SLOs, so one run gives the attainment at all scales.",
)


def run(effort: Effort) -> Result:
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
    panel = line_panel(
        [row for row in rows if row.config["scheduler"] != UNDRAWN],
        x="scale",
        y="slo_attainment",
        by="scheduler",
        where={"rate": rate},
        x_label="SLO / L^",
        y_label="share within the SLO",
        title=f"{rate:g} requests/s",
    )
    return replace(panel, series=assign_colours(panel.series), share=True, log_x=True)


REPRODUCTION = Reproduction(
    name=NAME, paper="SeaLLM, Fig. 10", measures="SLO attainment against the scale of the SLOs", run=run
)
