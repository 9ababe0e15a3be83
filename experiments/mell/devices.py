"""Devices, migrations, memory and preemptions of each packing policy (Mell, Fig. 11)."""

from collections.abc import Mapping, Sequence

from experiments.mell.setup import (
    MELLS,
    PAPER,
    POLICIES,
    Point,
    assumptions,
    measure,
    models,
    size_of,
    workloads,
)
from experiments.parallel import map_points
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value

NAME = "mell-devices"
_PAPER_SAVINGS = {"load-balance": 0.15, "best-fit": 0.20, "worst-fit": 0.20}
"""Largest saving of devices by Mell over all workloads, in the paper ("over 20%" for two policies)."""

DIFFERS = (
    "fewer_than_X_R: share of devices saved at the peak relative to X with its reading R of what fits. Only "
    "load balancing that reserves memory for growth reaches 0.01 preemptions per request; so both readings "
    "are given.",
    "Differs: Mell's margin depends on what fits in the baselines. Best fit by present size packs as densely "
    "as Mell and preempts most requests, several times each; with memory reserved for growth it hardly "
    "preempts, and needs many more devices. The paper does not say which it assumes, nor what happens to "
    "growth that does not fit; it must have reserved some memory.",
    "Differs: by size classes and eagerly (mell-literal, mell-eager), Mell migrates several times as often "
    "as load balancing; in the paper it migrates less. Ours (mell) does not repair what costs no device.",
)


def run(effort: Effort) -> Result:
    seconds, seeds = size_of(effort)
    points = [
        Point(workload, model, policy, seconds, seeds)
        for model in models(effort)
        for workload in workloads(effort)
        for policy in POLICIES
    ]
    found = map_points(effort, NAME, measure, points)
    rows = [_row(point, metrics, points, found) for point, metrics in zip(points, found, strict=True)]
    return Result(name=NAME, paper=PAPER + ", Fig. 11", assumptions=[*assumptions(), *DIFFERS], rows=rows)


def _row(
    point: Point, metrics: Mapping[str, float], points: Sequence[Point], found: Sequence[Mapping[str, float]]
) -> Row:
    config: dict[str, Value] = {"workload": point.workload, "model": point.model, **point.policy.config}
    if point.policy.policy not in MELLS:
        return Row(config=config, metrics=dict(metrics))
    comparable = [
        (other.policy, theirs)
        for other, theirs in zip(points, found, strict=True)
        if (other.workload, other.model) == (point.workload, point.model)
    ]
    fewer, paper = {}, {}
    for policy, theirs in comparable:
        if policy.policy in _PAPER_SAVINGS and not policy.draining:
            name = f"fewer_than_{policy.policy}_{policy.fits}".replace("-", "_")
            fewer[name] = 1 - metrics["peak_devices"] / theirs["peak_devices"]
            paper[name] = _PAPER_SAVINGS[policy.policy]
    literal = point.policy.policy == "mell-literal"
    return Row(config=config, metrics={**metrics, **fewer}, paper=paper if literal else None)


REPRODUCTION = Reproduction(
    name=NAME,
    paper="Mell, Fig. 11",
    measures="devices, migrations, memory in use, preemptions of every policy",
    run=run,
)
