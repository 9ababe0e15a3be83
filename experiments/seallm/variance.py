"""A sharing group whose output lengths deviate from the profiled ones (SeaLLM, Fig. 13)."""

from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row
from experiments.seallm.group_runs import ASSUMPTIONS, COMPARED, PAPER, Point, measure_all, panels
from experiments.seallm.workload import Traffic

NAME = "seallm-variance"
GROUP = "chats"
RATE = 3.0
SECONDS, QUICK_SECONDS = 20.0, 2.0
DEVIATIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)

DIFFERS = (
    "As in the paper, a normal error with a standard deviation of 0 to 16 times the output's length is "
    "added to every output. Lengths are clipped to one token and to the context, so the mean length and the "
    "load grow with the error (about sixfold for short outputs at 16). L^ is that of the profiled lengths.",
    "The paper prints no numbers for Fig. 13, only that all systems get worse with the error, that "
    "SeaLLM's lead shrinks, and that it stays the best. Online means adapt to the changed lengths, like "
    "SeaLLM's monitor.",
    "Differs: seallm-join falls behind vllm and muxserve from a deviation of 2 on; shoal stays ahead.",
)


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    points = [
        Point(GROUP, system, Traffic(RATE, seconds, output_deviation=deviation))
        for deviation in effort.choose(DEVIATIONS, DEVIATIONS[::4])
        for system in COMPARED
    ]
    rows = [
        Row(
            config={"output_deviation": point.traffic.output_deviation, "scheduler": point.system},
            metrics=found.metrics,
        )
        for point, found in zip(points, measure_all(NAME, points, effort), strict=True)
    ]
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 13",
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=rows,
        panels=[panels(rows, "output_deviation", "deviation / output length", {}, "", log=False)],
    )


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SeaLLM, Fig. 13",
    measures="latency and attainment against the error of profiled output lengths",
    run=run,
)
