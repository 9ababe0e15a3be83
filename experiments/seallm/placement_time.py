"""Run time of the placement search on 8 to 64 devices (SeaLLM, Fig. 14)."""

import os
import time

from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between
from experiments.seallm.group_runs import PAPER
from experiments.seallm.services import Traffic, phases
from experiments.seallm.systems import SYSTEMS, Window, place
from shoal.place.groupwise import GroupwiseEvaluator
from shoal.simulate.parallel import Workers
from shoal.simulate.simulated_groups import SimulatedGroups

NAME = "seallm-placement-time"
DEVICES, QUICK_DEVICES = (8, 16, 32, 64), (16,)
REQUESTS, QUICK_REQUESTS = 5000, 500
WINDOW_S, QUICK_WINDOW_S = 60.0, 6.0
COMPARED = ("seallm-literal", "seallm")
MOST_S = 60.0
"""Upper bound of the paper's times, with eight processes (section 6.4)."""

ASSUMPTIONS = (
    "The 16 services and devices of `seallm-end-to-end`, and 5,000 requests of a minute, on as many "
    "processes as there are cores; no results of other searches are reused. The paper says that all its "
    "times are below one minute with up to eight processes, and prints no other number.",
    "seallm: a search with formulas, then simulations choose among the best and improve the choice. "
    "seallm-literal: Algorithm 1 as printed, by formulas, its best placements simulated; the paper "
    "simulates every step of it.",
    "`groups` is the number of different groups simulated. Times depend on the machine and differ from run "
    "to run; the other metrics do not.",
)


def run(effort: Effort) -> Result:
    count, window_s = effort.choose(REQUESTS, QUICK_REQUESTS), effort.choose(WINDOW_S, QUICK_WINDOW_S)
    # Some more, since the number of arrivals in a window is random.
    [history] = phases(Traffic(1.2 * count / window_s, window_s, phases=1))
    points = [(name, devices) for devices in effort.choose(DEVICES, QUICK_DEVICES) for name in COMPARED]
    rows = [
        Row(
            config={"search": name, "devices": devices},
            metrics=_measure(Window.of(SYSTEMS[name], devices, history[:count], window_s), name, effort),
            paper=between("seconds", 0.0, MOST_S) if name == "seallm-literal" else None,
        )
        for name, devices in effort.each(NAME, points)
    ]
    panel = line_panel(
        rows, x="devices", y="seconds", by="search", where={}, x_label="devices", y_label="time to place (s)"
    )
    return Result(name=NAME, paper=PAPER + ", Fig. 14", assumptions=ASSUMPTIONS, rows=rows, panels=[[panel]])


def _measure(window: Window, name: str, effort: Effort) -> dict[str, Value]:
    begin_s = time.perf_counter()
    with Workers(window.traffic, 1 if effort.quick else os.cpu_count()) as workers:
        simulated = GroupwiseEvaluator(SimulatedGroups(window.traffic, workers))
        estimate = place(SYSTEMS[name], window, simulated).estimate
    return {
        "seconds": time.perf_counter() - begin_s,
        "groups": simulated.shapes,
        "slo_attainment": estimate.attainment,
        "normalised_latency": estimate.normalised_latency,
    }


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SeaLLM, Fig. 14",
    measures="run time of the placement search, on 8 to 64 devices",
    run=run,
)
