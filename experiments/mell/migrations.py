"""Migrations per second of load balancing, by its threshold, and of Mell (Mell, Fig. 12)."""

from experiments.mell.setup import (
    MELLS,
    PAPER,
    Point,
    Policy,
    assumptions,
    measure,
    models,
    size_of,
    workloads,
)
from experiments.parallel import map_points
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value

NAME = "mell-migrations"
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3)
OURS = ("mell", "mell-forecast")
HEADROOMS = (0.02, 0.05, 0.08, 0.12)
SHOWN = ("poisson-1.1", "azure")

DIFFERS = (
    "The paper draws this figure and prints no numbers: Mell migrates less than load balancing under every "
    "workload.",
    "Differs: by classes (mell-literal, mell-eager) Mell migrates more than load balancing at any threshold, "
    "since a growing request migrates at each class. The paper must have assumed a balancer "
    "that acts more often than once a second, several times for each pair, or requests that hardly change "
    "class.",
    "Ours (mell, mell-forecast) trades migrations for devices: headroom is the share of a device that "
    "placements leave free. At 0.12 it needs fewer devices than load balancing with 0.2, and migrates less.",
)


def run(effort: Effort) -> Result:
    seconds, seeds = size_of(effort)
    policies = [
        *(
            Policy("load-balance", threshold=threshold, draining=draining)
            for draining in (False, True)
            for threshold in THRESHOLDS
        ),
        *(Policy(name) for name in MELLS if name not in OURS),
        *(Policy(name, headroom=headroom) for name in OURS for headroom in HEADROOMS),
    ]
    points = [
        Point(workload, model, policy, seconds, seeds)
        for model in models(effort)[:1]
        for workload in workloads(effort)
        if workload in SHOWN
        for policy in policies
    ]
    rows = []
    for point, metrics in zip(points, map_points(effort, NAME, measure, points), strict=True):
        policy = point.policy
        balances = policy.policy == "load-balance"
        config: dict[str, Value] = {
            "workload": point.workload,
            "model": point.model,
            "policy": policy.policy,
            "draining": policy.draining,
            "threshold": policy.threshold if balances else None,
            "headroom": policy.headroom,
        }
        rows.append(Row(config=config, metrics=dict(metrics)))
    panel = line_panel(
        [row for row in rows if row.config["policy"] == "load-balance"],
        x="threshold",
        y="migrations_per_s",
        by="draining",
        where={"workload": SHOWN[0]},
        x_label="threshold",
        y_label="migrations/s",
        title="load balancing",
    )
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 12",
        assumptions=[*assumptions(), *DIFFERS],
        rows=rows,
        panels=[[panel]],
    )


REPRODUCTION = Reproduction(
    name=NAME,
    paper="Mell, Fig. 12",
    measures="migrations per second: load balancing with thresholds of 0 to 0.3, and Mell",
    run=run,
)
