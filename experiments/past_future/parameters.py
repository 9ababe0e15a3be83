"""Steps and preemptions over each policy's parameter, with drifting output lengths (Past-Future, Fig. 8)."""

from collections.abc import Sequence

from experiments.parallel import map_points
from experiments.past_future.admissions import PublishedPastFuture
from experiments.past_future.setup import (
    ADMIT_EVERY,
    OUR_RESERVE,
    OUR_VICTIM,
    PAPER,
    FullQueue,
    run_full_queue,
)
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from shoal.measure import Panel
from shoal.schedule import Admission, Aggressive, Conservative, Oracle, PastFuture

NAME = "past-future-parameters"
LENGTHS_NAME = "varying"
LONGEST = 8192
"""Limit of output tokens; a reasoning model's longest answers are cut."""
REQUESTS, QUICK_REQUESTS = 1_000, 80

RESERVES = (0.01, OUR_RESERVE, 0.05, 0.1, 0.15, 0.2)
WATERMARKS = (0.99, 0.97, 0.95, 0.9, 0.85, 0.8)
OVERCOMMITS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
QUICK_POINTS = 2


def run(effort: Effort) -> Result:
    points = _points(effort.choose(len(RESERVES), QUICK_POINTS))
    runs = [
        FullQueue(
            lengths=LENGTHS_NAME,
            longest=LONGEST,
            admission=admission,
            victim=OUR_VICTIM if policy == "shoal" else "newest",
            requests=effort.choose(REQUESTS, QUICK_REQUESTS),
        )
        for policy, _, admission in points
    ]
    found = map_points(effort, NAME, run_full_queue, runs)
    best = found[0].steps
    rows = []
    for (policy, parameter, _), counts in zip(points, found, strict=True):
        config: dict[str, Value] = {"policy": policy, "parameter": parameter}
        metrics: dict[str, Value] = {"steps_over_oracle": counts.steps / best - 1, **counts.metrics()}
        rows.append(Row(config=config, metrics=metrics))
    return Result(
        name=NAME,
        paper=PAPER + ", Fig. 8",
        assumptions=[
            "From the paper: ShareGPT-o1 followed by distributions 1 to 3. The figure is drawn, not "
            "printed; the text says that past-future is better than the others with every parameter.",
            "1,000 requests, a quarter of each part, otherwise as in past-future-table1. ShareGPT-o1: a "
            "distribution fitted to the artefact's lengths, outputs cut at 8,192 tokens.",
            "shoal: a new service.",
        ],
        rows=rows,
        panels=[_panels(rows)],
    )


def _points(count: int) -> list[tuple[str, float | None, Admission]]:
    """Policy name, parameter and admission, ``count`` of each; the oracle first."""
    every = ADMIT_EVERY
    points: list[tuple[str, float | None, Admission]] = [("oracle", None, Oracle(admit_every=every))]
    for share in RESERVES[:count]:
        published = PublishedPastFuture(reserved=share, admit_every=every)
        points.append(("past-future", share, published))
    for share in RESERVES[:count]:
        points.append(("shoal", share, PastFuture(reserved=share, admit_every=every)))
    for share in WATERMARKS[:count]:
        points.append(("aggressive", share, Aggressive(watermark=share, admit_every=every)))
    for share in OVERCOMMITS[:count]:
        points.append(("conservative", share, Conservative(overcommit=share, admit_every=every)))
    return points


def _panels(rows: Sequence[Row]) -> list[Panel]:
    """Steps against preemptions, and against recomputed tokens."""
    shown = [
        Row(config={**row.config, **row.metrics}, metrics=row.metrics)
        for row in rows
        if row.config["policy"] != "oracle"
    ]
    return [
        line_panel(
            shown,
            x=cost,
            y="steps_over_oracle",
            by="policy",
            where={},
            x_label=label,
            y_label="decoding steps over the oracle's",
        )
        for cost, label in (
            ("preemptions_per_request", "preemptions per request"),
            ("recomputed_tokens", "recomputed tokens"),
        )
    ]


REPRODUCTION = Reproduction(
    name=NAME,
    paper="Past-Future, Fig. 8",
    measures="decoding steps and preemptions over each scheduler's parameter, on a load that changes",
    run=run,
)
