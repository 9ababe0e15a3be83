"""Migrations saved by handling an epoch's operations as one batch (Mell, Fig. 13)."""

from experiments.mell.setup import PAPER, Point, Policy, assumptions, measure, models, size_of, workloads
from experiments.mell.workload import AZURE
from experiments.parallel import map_points
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value

NAME = "mell-batching"
EPOCHS_S = (1.0, 5.0)
SHOWN = ("mell-literal", "mell-eager", "mell")

NOTES = (
    "Together: departures, updates, arrivals, then remaining holes are filled, and a request migrates once. "
    "Apart: the same operations in the same order, each repaired before the next. migrations_cut is the "
    "share of migrations that batching saves; the paper's are its largest (30% Poisson, 25% Azure).",
    "The paper does not print the length of an epoch; longer epochs save more.",
)


def run(effort: Effort) -> Result:
    seconds, seeds = size_of(effort)
    points = [
        Point(workload, model, Policy(policy), seconds, seeds, epoch_s=epoch_s, batched=batched)
        for model in models(effort)[:1]
        for workload in workloads(effort)
        for policy in SHOWN
        for epoch_s in EPOCHS_S
        for batched in (True, False)
    ]
    found = map_points(effort, NAME, measure, points)
    rows = []
    for point, together, apart in zip(points[::2], found[::2], found[1::2], strict=True):
        config: dict[str, Value] = {
            "workload": point.workload,
            "model": point.model,
            "policy": point.policy.policy,
            "epoch_s": point.epoch_s,
        }
        metrics: dict[str, Value] = {
            "migrations_per_s": together["migrations_per_s"],
            "apart_migrations_per_s": apart["migrations_per_s"],
            "migrations_cut": 1 - together["migrations_per_s"] / max(apart["migrations_per_s"], 1e-9),
            "peak_devices": together["peak_devices"],
            "apart_peak_devices": apart["peak_devices"],
        }
        paper: dict[str, Value] | None = None
        if point.policy.policy == "mell-literal":
            paper = {"migrations_cut": 0.25 if point.workload == AZURE else 0.30}
        rows.append(Row(config=config, metrics=metrics, paper=paper))
    return Result(name=NAME, paper=PAPER + ", Fig. 13", assumptions=[*assumptions(), *NOTES], rows=rows)


REPRODUCTION = Reproduction(
    name=NAME,
    paper="Mell, Fig. 13",
    measures="migrations with an epoch's operations together and apart",
    run=run,
)
