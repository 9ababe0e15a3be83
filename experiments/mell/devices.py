"""How many devices each policy needs (Mell, Fig. 11), with everything else that a run shows."""

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
from experiments.parallel import at_each
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value

NAME = "mell-devices"
_CUTS = {"load-balance": 0.15, "best-fit": 0.20, "worst-fit": 0.20}
"""How many fewer devices the paper says Mell needs, at most over all workloads ("over 20%" for two)."""

DIFFERS = (
    "fewer_than_X_R: how many fewer devices at the peak than X needs in its reading R of what fits. Only "
    "load balancing that sets room aside reaches 0.01 preemptions per request; so both readings are given.",
    "Differs: how much better Mell is depends on what the baselines take as fitting. Best fit by present "
    "size packs as densely as Mell and preempts most requests, several times each; with room set aside "
    "for growth it hardly preempts, and needs many more devices. The paper does not say which it takes, "
    "nor what happens to growth that finds no room; it must have set something aside.",
    "Differs: by classes and at once (mell-literal, mell-eager), Mell migrates several times as often as "
    "load balancing, where the paper has it migrate less. Ours (mell) leaves what costs no device as it "
    "is.",
)


def run(effort: Effort) -> Result:
    """Every policy on every workload and model."""
    seconds, seeds = size_of(effort)
    points = [
        Point(workload, model, policy, seconds, seeds)
        for model in models(effort)
        for workload in workloads(effort)
        for policy in POLICIES
    ]
    found = at_each(effort, NAME, measure, points)
    rows = [_row(point, metrics, points, found) for point, metrics in zip(points, found, strict=True)]
    return Result(name=NAME, paper=PAPER + ", Fig. 11", assumptions=[*assumptions(), *DIFFERS], rows=rows)


def _row(
    point: Point, metrics: Mapping[str, float], points: Sequence[Point], found: Sequence[Mapping[str, float]]
) -> Row:
    config: dict[str, Value] = {"workload": point.workload, "model": point.model, **point.policy.config}
    if point.policy.policy not in MELLS:
        return Row(config=config, metrics=dict(metrics))
    alike = [
        (other.policy, theirs)
        for other, theirs in zip(points, found, strict=True)
        if (other.workload, other.model) == (point.workload, point.model)
    ]
    fewer, paper = {}, {}
    for policy, theirs in alike:
        if policy.policy in _CUTS and not policy.draining:
            name = f"fewer_than_{policy.policy}_{policy.fits}".replace("-", "_")
            fewer[name] = 1 - metrics["peak_devices"] / theirs["peak_devices"]
            paper[name] = _CUTS[policy.policy]
    literal = point.policy.policy == "mell-literal"
    return Row(config=config, metrics={**metrics, **fewer}, paper=paper if literal else None)


REPRODUCTION = Reproduction(
    name=NAME,
    paper="Mell, Fig. 11",
    says="devices, migrations, memory in use, preemptions of every policy",
    run=run,
)
