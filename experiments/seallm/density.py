"""Latency and SLO attainment of SeaLLM's 16 services on 16 to 64 devices (Fig. 11)."""

from experiments.parallel import map_points
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row
from experiments.seallm.end_to_end import ASSUMPTIONS, Point, measure
from experiments.seallm.group_runs import PAPER
from experiments.seallm.services import Traffic

NAME = "seallm-density"
DENSITIES, QUICK_DENSITIES = {64: 0.5, 48: 2 / 3, 32: 1.0, 16: 2.0}, {32: 1.0, 16: 2.0}
"""By number of devices."""
RATE, QUICK_RATE = 20.0, 6.0
PHASE_S, QUICK_PHASE_S = 60.0, 6.0
COMPARED, QUICK_COMPARED = ("vllm", "alpaserve", "muxserve", "seallm", "shoal"), ("vllm", "seallm")

DIFFERS = (
    "As `seallm-end-to-end`, at 20 requests/s. `density` is 32 / devices (the paper calls 48 devices 0.67). "
    "The paper prints no numbers for Fig. 11, only that SeaLLM is best, most on crowded clusters, and that "
    "MuxServe finds no placement at density 2; here services that do not fit are refused, and their requests "
    "(`refused`) count as missed SLOs.",
)


def run(effort: Effort) -> Result:
    traffic = Traffic(effort.choose(RATE, QUICK_RATE), effort.choose(PHASE_S, QUICK_PHASE_S))
    points = [
        (density, Point(system, traffic, devices))
        for devices, density in effort.choose(DENSITIES, QUICK_DENSITIES).items()
        for system in effort.choose(COMPARED, QUICK_COMPARED)
    ]
    found = map_points(
        effort,
        NAME,
        measure,
        [point for _, point in points],
        heaviest_first=lambda point: (point.system in ("seallm", "shoal")) * point.devices,
    )
    rows = [
        Row(config={"system": point.system, "devices": point.devices, "density": density}, metrics=metrics)
        for (density, point), metrics in zip(points, found, strict=True)
    ]
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 11",
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=rows,
        panels=[
            [
                line_panel(
                    rows, x="density", y=metric, by="system", where={}, x_label="density", y_label=label
                )
                for metric, label in (
                    ("normalised_latency", "mean latency / L^"),
                    ("slo_attainment", "share within 5 L^"),
                )
            ]
        ],
    )


REPRODUCTION = Reproduction(
    name=NAME, paper="SeaLLM, Fig. 11", measures="latency and SLO attainment on 16 to 64 devices", run=run
)
