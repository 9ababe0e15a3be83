"""A sharing group with skewed traffic: runs of one service, or a popular service (SeaLLM, Fig. 12)."""

from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row
from experiments.seallm.group_runs import ASSUMPTIONS, COMPARED, PAPER, Point, measure_all, panels
from experiments.seallm.workload import Traffic

NAME = "seallm-skew"
GROUP = "chats"
RATE = 10.0
SECONDS, QUICK_SECONDS = 20.0, 2.0
CONSECUTIVE = (1, 4, 16, 32)
SHARES = (0.3, 0.5, 0.7, 0.9)

DIFFERS = (
    "Fig. 12 varies the number of consecutive requests of the same service (`consecutive`): one stream of "
    "arrivals alternates between the services in such runs. The paper prints no numbers for it, only that "
    "all systems get slightly worse with longer runs, and that SeaLLM stays the best.",
    "`short_share` is our addition: the share of requests of short-chat, each service with its own bursts.",
)


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    traffics = [
        Traffic(RATE, seconds, consecutive=run_length)
        for run_length in effort.choose(CONSECUTIVE, CONSECUTIVE[::3])
    ]
    traffics += [
        Traffic(RATE, seconds, shares={"short-chat": share, "long-chat": 1 - share})
        for share in effort.choose(SHARES, SHARES[-1:])
    ]
    points = [Point(GROUP, system, traffic) for traffic in traffics for system in COMPARED]
    rows = [
        Row(
            config={
                "consecutive": point.traffic.consecutive,
                "short_share": None if point.traffic.shares is None else point.traffic.shares["short-chat"],
                "scheduler": point.system,
            },
            metrics=found.metrics,
        )
        for point, found in zip(points, measure_all(NAME, points, effort), strict=True)
    ]
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 12",
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=rows,
        panels=[
            panels(rows, "consecutive", "consecutive requests of a service", {}, ""),
            panels(rows, "short_share", "share of short chats", {}, "", log=False),
        ],
    )


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SeaLLM, Fig. 12",
    measures="latency and attainment against skew between services",
    run=run,
)
