"""Requests served by a fixed number of devices, with migration and without (Mell, Fig. 6)."""

from collections.abc import Mapping

from experiments.mell.setup import PAPER, Point, Policy, assumptions, measure, models, size_of
from experiments.parallel import map_points
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between

NAME = "mell-served"
DEVICES = (4, 8, 16)
WORKLOAD = "poisson-1.1"
POLICIES = (
    Policy("best-fit"),
    Policy("best-fit", "reserve-mean"),
    Policy("worst-fit"),
    Policy("worst-fit", "reserve-mean"),
    Policy("load-balance"),
    Policy("mell"),
    Policy("mell-forecast"),
)

NOTES = (
    "The paper prints only the metric of Fig. 6: the share of requests whose KV is retained. Here a request "
    f"that fits nowhere on arrival is rejected, and a preempted one is lost; with {WORKLOAD} and these few "
    "devices many are.",
    "more_than_X: additional requests answered, relative to X in its better reading.",
)


def run(effort: Effort) -> Result:
    seconds, seeds = size_of(effort)
    points = [
        Point(WORKLOAD, model, policy, seconds, seeds, groups=devices, waits=False)
        for model in models(effort)[:1]
        for devices in effort.choose(DEVICES, DEVICES[:1])
        for policy in POLICIES
    ]
    found = map_points(effort, NAME, measure, points)
    served = {
        (point.groups, point.policy): metrics["served"] for point, metrics in zip(points, found, strict=True)
    }
    rows = []
    for point, metrics in zip(points, found, strict=True):
        config: dict[str, Value] = {
            "devices": point.groups,
            "policy": point.policy.policy,
            "fits": point.policy.fits,
        }
        values: dict[str, Value] = {name: metrics[name] for name in ("served", "kv_utilisation")}
        values["lost_per_request"] = metrics["preemptions_per_request"]
        paper = None
        if point.policy.policy.startswith("mell"):
            values |= _more_served(served, point, metrics["served"])
            paper = between("more_than_worst_fit", 0.23, 0.60)
        rows.append(Row(config=config, metrics=values, paper=paper))
    return Result(name=NAME, paper=PAPER + ", Fig. 6", assumptions=[*assumptions(), *NOTES], rows=rows)


def _more_served(served: Mapping[tuple[int, Policy], float], point: Point, own: float) -> dict[str, Value]:
    more: dict[str, Value] = {}
    for name in ("best-fit", "worst-fit"):
        best = max(
            share
            for (groups, policy), share in served.items()
            if (groups, policy.policy) == (point.groups, name)
        )
        more["more_than_" + name.replace("-", "_")] = own / max(best, 1e-9) - 1
    return more


REPRODUCTION = Reproduction(
    name=NAME, paper="Mell, Fig. 6", measures="requests answered by a fixed number of devices", run=run
)
