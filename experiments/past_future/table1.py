"""Decode steps, memory and preemptions of admission policies (Past-Future, Table 1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.parallel import map_points
from experiments.past_future.admissions import AssumedLimit, PublishedPastFuture
from experiments.past_future.setup import (
    ADMIT_EVERY,
    OUR_RESERVE,
    OUR_VICTIM,
    PAPER,
    REQUESTS,
    Counts,
    FullQueue,
    run_full_queue,
)
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from shoal.measure import Panel, Series
from shoal.schedule import Admission, Aggressive, Oracle, PastFuture

NAME = "past-future-table1"
QUICK_REQUESTS = 80
QUICK_DISTRIBUTIONS = (1,)

Policy = Literal["oracle", "past-future", "shoal", "aggressive", "conservative"]

LONGEST: Mapping[int, int] = {1: 4096, 2: 5000, 3: 4096}
"""Limit of output tokens, by distribution."""
ASSUMED = 4096
"""Output tokens that the conservative policy reserves."""

TABLE: Sequence[tuple[int, Policy, float | None, int, float, float, float]] = (
    (1, "oracle", None, 294250, 0.9487, 0.9889, 0.0),
    (1, "past-future", 0.03, 296710, 0.9361, 0.9747, 0.0686),
    (1, "past-future", 0.05, 301680, 0.9187, 0.9573, 0.0337),
    (1, "past-future", 0.10, 320720, 0.8709, 0.9151, 0.0158),
    (1, "aggressive", 0.99, 284160, 0.9841, 1.0312, 0.9374),
    (1, "aggressive", 0.95, 290980, 0.9610, 1.0121, 0.2408),
    (1, "aggressive", 0.90, 302900, 0.9246, 0.9787, 0.1076),
    (1, "conservative", 1.0, 485650, 0.5775, 0.6079, 0.0),
    (1, "conservative", 1.5, 320530, 0.8734, 0.9079, 0.1723),
    (2, "oracle", None, 653120, 0.9257, 0.9829, 0.0),
    (2, "past-future", 0.03, 654500, 0.9216, 0.9721, 0.0742),
    (2, "past-future", 0.05, 669770, 0.9007, 0.9582, 0.0439),
    (2, "past-future", 0.10, 705920, 0.8526, 0.9099, 0.0154),
    (2, "aggressive", 0.99, 616230, 0.9783, 1.0368, 0.9772),
    (2, "aggressive", 0.95, 628410, 0.9586, 1.0181, 0.2619),
    (2, "aggressive", 0.90, 654190, 0.9237, 0.9912, 0.1388),
    (2, "conservative", 1.0, 842470, 0.7171, 0.7545, 0.0),
    (2, "conservative", 1.25, 665970, 0.9064, 0.9468, 0.8434),
    (3, "oracle", None, 230690, 0.9660, 0.9860, 0.0),
    (3, "past-future", 0.03, 239260, 0.9450, 0.9651, 0.0259),
    (3, "past-future", 0.05, 241650, 0.9264, 0.9462, 0.0087),
    (3, "past-future", 0.10, 263670, 0.8780, 0.8987, 0.0),
    (3, "aggressive", 0.99, 227250, 0.9813, 1.0020, 0.3430),
    (3, "aggressive", 0.95, 234540, 0.9507, 0.9716, 0.0323),
    (3, "aggressive", 0.90, 247130, 0.9029, 0.9233, 0.0017),
    (3, "conservative", 1.0, 374250, 0.5973, 0.6159, 0.0),
    (3, "conservative", 1.5, 246870, 0.9045, 0.9254, 0.1909),
)
"""Distribution, policy and its parameter; steps, memory in use, memory required in future, preemptions per
request."""

ASSUMPTIONS = (
    "From the paper: the distributions, the schedulers and their parameters, a window of 1,000 requests.",
    "From the authors' artefact (github.com/WuSiYu/lightllm-ae): 3,000 requests, all queued from the start; "
    "120,000 tokens of KV, in blocks of one token; lengths of distribution 2 from 3,000 to 5,000; admission "
    "every ten steps; conservative reserves 4,096 output tokens everywhere. Steps after the last admission "
    "are not counted, and counts are per request that has ended until then.",
    "Prompts are computed in the step that admits them, together with decodes. A preempted request loses its "
    "memory, goes back to the head of the queue and is recomputed; in the paper's systems it is the newest.",
    "past-future, as in the artefact: a history of 1,000 that starts half full of 512 tokens; M* is the "
    "largest of 5 draws. Running requests' lengths are interpolated between what they have generated, the "
    "history's greater lengths and the limit; waiting ones' are the history's, drawn again at every look.",
    "shoal: a new service; Kaplan and Meier's estimate until 1,000 requests have ended, the mean M* of 10 "
    "draws, 2.4% in reserve, victims large and young. Recomputed tokens are what steps hide.",
)
DIFFERS: tuple[str, ...] = (
    "Differs: aggressive preempts fewer requests on distribution 2.",
    "Differs: preemptions (the paper's evictions) of overcommitted conservative rows. Our scheduler admits "
    "no request that does not fit, so these wait and are never preempted; `turned_away_per_request` counts "
    "them, and together with `preemptions_per_request` it is near the paper's figure for distributions 2 "
    "and 3.",
)


@dataclass(frozen=True, slots=True)
class _Line:
    distribution: int
    policy: Policy
    parameter: float | None
    """The reserve, watermark or overcommitment."""
    paper: Mapping[str, Value] | None
    """The paper's figures; None for our policy."""


def admission_of(policy: Policy, parameter: float | None) -> Admission:
    """A policy of the table. parameter: its reserve, watermark or overcommitment."""
    value = 0.0 if parameter is None else parameter
    if policy == "past-future":
        return PublishedPastFuture(reserved=value, admit_every=ADMIT_EVERY)
    if policy == "shoal":
        return PastFuture(reserved=value, admit_every=ADMIT_EVERY)
    if policy == "aggressive":
        return Aggressive(watermark=value, admit_every=ADMIT_EVERY)
    if policy == "conservative":
        return AssumedLimit(overcommit=value, assumed=ASSUMED, admit_every=ADMIT_EVERY)
    return Oracle(admit_every=ADMIT_EVERY)


def queue_of(
    policy: Policy, parameter: float | None, distribution: int, requests: int, seed: int
) -> FullQueue:
    return FullQueue(
        lengths=f"distribution-{distribution}",
        longest=LONGEST[distribution],
        admission=admission_of(policy, parameter),
        victim=OUR_VICTIM if policy == "shoal" else "newest",
        requests=requests,
        seed=seed,
    )


def run(effort: Effort) -> Result:
    count = effort.choose(REQUESTS, QUICK_REQUESTS)
    distributions = effort.choose(tuple(LONGEST), QUICK_DISTRIBUTIONS)
    table = [line for line in _lines() if line.distribution in distributions]
    runs = [queue_of(line.policy, line.parameter, line.distribution, count, 0) for line in table]
    found = map_points(effort, NAME, run_full_queue, runs, heaviest_first=_cost)
    measured = list(zip(table, found, strict=True))
    best = {line.distribution: counts for line, counts in measured if line.policy == "oracle"}
    rows = [_row(line, counts, best[line.distribution]) for line, counts in measured]
    return Result(
        name=NAME,
        paper=PAPER + ", Table 1",
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=rows,
        panels=[[_panel(rows, distribution) for distribution in distributions]],
    )


def _lines() -> list[_Line]:
    """The table, with lines of our policy after those of Past-Future."""
    best = {distribution: steps for distribution, policy, _, steps, *_ in TABLE if policy == "oracle"}
    lines: list[_Line] = []
    for distribution, policy, parameter, steps, in_use, required, preemptions in TABLE:
        if policy == "aggressive" and lines[-1].policy == "past-future":
            lines.append(_Line(distribution, "shoal", OUR_RESERVE, None))
        paper: dict[str, Value] = {
            "decoding_steps": steps,
            "steps_over_oracle": steps / best[distribution] - 1,
            "kv_in_use": in_use,
            "future_required": required,
            "preemptions_per_request": preemptions,
        }
        lines.append(_Line(distribution, policy, parameter, paper))
    return lines


def _cost(queue: FullQueue) -> float:
    """Relative cost of a run: outputs, and more where every admission forecasts lengths."""
    return queue.longest * (1 if isinstance(queue.admission, Oracle | PastFuture) else 0.5)


def _row(line: _Line, found: Counts, best: Counts) -> Row:
    return Row(
        config={
            "distribution": line.distribution,
            "policy": line.policy,
            "parameter": line.parameter,
        },
        metrics={
            "decoding_steps": found.steps,
            "steps_over_oracle": found.steps / best.steps - 1,
            **found.metrics(),
        },
        paper=line.paper,
    )


def _panel(rows: Sequence[Row], distribution: int) -> Panel:
    """Steps against preemptions, a line for each policy over its parameters, and the paper's points."""
    chosen = [row for row in rows if row.config["distribution"] == distribution]
    series = []
    for colour, policy in enumerate(dict.fromkeys(row.config["policy"] for row in chosen)):
        own = [row for row in chosen if row.config["policy"] == policy]
        series.append(_series(str(policy), [row.metrics for row in own], colour, line=len(own) > 1))
        theirs = [row.paper for row in own if row.paper is not None]
        if theirs:
            series.append(_series(f"{policy}, paper", theirs, colour, line=False))
    return Panel(
        title=f"distribution {distribution}",
        x_label="preemptions per request",
        y_label="decoding steps over the oracle's",
        series=series,
    )


def _series(label: str, figures: Sequence[Mapping[str, Value]], colour: int, *, line: bool) -> Series:
    xs = [float(metrics["preemptions_per_request"] or 0) for metrics in figures]
    ys = [float(metrics["steps_over_oracle"] or 0) for metrics in figures]
    return Series(label, xs, ys, line=line, colour=colour)


REPRODUCTION = Reproduction(
    name=NAME,
    paper="Past-Future, Table 1",
    measures="decoding steps, memory and preemptions of each admission on three distributions of lengths",
    run=run,
)
