"""Migrations against the time between two packings: when load balancing migrates more (Mell, Fig. 12)."""

from experiments.mell.setup import DEPARTING, PAPER, Point, Policy, assumptions, measure, size_of
from experiments.parallel import map_points
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value

NAME = "mell-epochs"
EPOCHS_S, QUICK_EPOCHS_S = (0.05, 0.25, 1.0, 5.0), (0.25, 1.0)
SEEDS = 3
SHOWN = (
    *(Policy("load-balance", threshold=threshold) for threshold in (0.0, 0.1, 0.2)),
    *(Policy(name) for name in ("mell", "mell-literal", DEPARTING)),
)

NOTES = (
    f"From the paper: load balancing migrates more often than Mell. 7B at 1.1 requests per second, {SEEDS} "
    "seeds. In mell-departing all requests but the largest leave an overloaded L device, as the paper has it "
    "(Fig. 10, Update 2 and 3); in mell-literal the smallest that suffices.",
    "Differs: by classes Mell migrates more often than load balancing that tolerates no difference, too; "
    "the shorter the epoch, the closer they are, since a request changes its class only a few times. Ours "
    "(mell) migrates less than load balancing that tolerates a tenth of a device.",
)


def run(effort: Effort) -> Result:
    seconds, seeds = size_of(effort)
    points = [
        Point("poisson-1.1", "llama2-7b", policy, seconds, min(seeds, SEEDS), epoch_s=epoch_s)
        for epoch_s in effort.choose(EPOCHS_S, QUICK_EPOCHS_S)
        for policy in SHOWN
    ]
    found = map_points(effort, NAME, measure, points, heaviest_first=lambda point: 1 / point.epoch_s)
    rows = []
    for point, metrics in zip(points, found, strict=True):
        balances = point.policy.policy == "load-balance"
        threshold = point.policy.threshold if balances else None
        config: dict[str, Value] = {
            "epoch_s": point.epoch_s,
            "policy": point.policy.policy,
            "threshold": threshold,
        }
        shown = ("peak_devices", "mean_devices", "migrations_per_s", "preemptions_per_request")
        rows.append(Row(config=config, metrics={name: metrics[name] for name in shown}))
    named = [Row(config={**row.config, "system": _name(row)}, metrics=row.metrics) for row in rows]
    panel = line_panel(
        named,
        x="epoch_s",
        y="migrations_per_s",
        by="system",
        where={},
        x_label="time between two packings (s)",
        y_label="migrations per second",
        title="7B, 1.1 requests/s",
    )
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 12",
        assumptions=[*assumptions(), *NOTES],
        rows=rows,
        panels=[[panel]],
    )


def _name(row: Row) -> str:
    threshold = row.config["threshold"]
    return str(row.config["policy"]) + ("" if threshold is None else f" {threshold:g}")


REPRODUCTION = Reproduction(
    name=NAME,
    paper="Mell, Fig. 12",
    measures="migrations against the time between two packings, also with all others leaving an overload",
    run=run,
)
