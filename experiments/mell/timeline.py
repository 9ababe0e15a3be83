"""Active devices over time, by packing policy (Mell, Fig. 15)."""

from statistics import fmean

from experiments.mell.setup import PAPER, Point, Policy, assumptions, models, simulate, size_of
from experiments.parallel import map_points
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row

NAME = "mell-timeline"
SHOWN = (
    Policy("best-fit", "reserve-mean"),
    Policy("worst-fit", "reserve-mean"),
    Policy("load-balance"),
    Policy("mell"),
)
BUCKET_S = 30.0


def run(effort: Effort) -> Result:
    seconds, _ = size_of(effort)
    chosen = models(effort)
    points = [Point("poisson-1.1", model, policy, seconds, 1) for model in chosen for policy in SHOWN]
    rows = []
    for point, devices in zip(points, map_points(effort, NAME, devices_over_time, points), strict=True):
        for number, (active, fewest) in enumerate(devices):
            rows.append(
                Row(
                    config={
                        "model": point.model,
                        "policy": point.policy.policy,
                        "fits": point.policy.fits,
                        "time_s": number * BUCKET_S,
                    },
                    metrics={"devices": active, "lower_bound": fewest},
                )
            )
    panels = [
        line_panel(
            rows,
            x="time_s",
            y="devices",
            by="policy",
            where={"model": model},
            x_label="time (s)",
            y_label="devices",
            title=model,
        )
        for model in chosen
    ]
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 15",
        assumptions=[
            *assumptions(),
            f"Means over {BUCKET_S:.0f} s, of one seed. The paper draws the curves without printing them: "
            "all begin and fluctuate in the same way, and Mell's is always the lowest.",
        ],
        rows=rows,
        panels=[panels],
    )


def devices_over_time(point: Point) -> list[tuple[float, float]]:
    """Mean active devices, and the fewest possible, for each bucket of time during arrivals."""
    run = simulate(point, 0)
    epochs = round(BUCKET_S / point.epoch_s)
    starts = range(0, round(point.seconds / point.epoch_s), epochs)
    return [
        (fmean(run.active[start : start + epochs]), fmean(run.fewest[start : start + epochs]))
        for start in starts
    ]


REPRODUCTION = Reproduction(name=NAME, paper="Mell, Fig. 15", measures="devices over time", run=run)
