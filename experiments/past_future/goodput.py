"""Past-Future's Figs. 7 and 9: goodput under an SLA against the number of clients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.parallel import at_each
from experiments.past_future.clients import (
    BATCHED_TOKENS,
    Clients,
    Deployment,
    requests_that_fit,
    run_clients,
)
from experiments.past_future.setup import (
    ADMIT_EVERY,
    OUR_RESERVE,
    OUR_VICTIM,
    PAPER,
    PublishedPastFuture,
    WarmPastFuture,
)
from experiments.pictures import lines
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between
from shoal.measure import Panel
from shoal.schedule import Admission, Aggressive, Conservative

NAME = "past-future-goodput"
ROUNDS, QUICK_ROUNDS = 6, 3
"""Requests of each client."""
RESERVE = 0.05
WATERMARK = 0.95
SPLIT_FUSE_TOKENS = 512

DEPLOYMENTS: Mapping[str, Deployment] = {
    "7B": Deployment("llama-2-7b", 1, 10.0, 1.5),
    "13B": Deployment("llama-2-13b", 1, 10.0, 1.5),
    "70B": Deployment("llama-2-70b", 4, 15.0, 5.0),
}
LONGEST: Mapping[str, int] = {
    "sharegpt-o1": 8192,
    "distribution-1": 4096,
    "distribution-2": 5120,
    "distribution-3": 4096,
    "sharegpt": 2048,
}
"""Output tokens at which answers end, by workload."""
LOADS = (0.5, 0.75, 0.9, 1.0, 1.15, 1.4)
"""Clients, as shares of the requests that would fill the memory on average."""
QUICK_LOADS = (1.0,)


@dataclass(frozen=True, slots=True)
class _System:
    """What is compared."""

    admission: Admission
    """Its admission."""
    batched_tokens: int = BATCHED_TOKENS
    """Most tokens of a step."""
    victim: str = "newest"
    """Whom it preempts: the policy's name."""


def _schedulers(workload: str) -> dict[str, _System]:
    """Fig. 7: admissions inside one framework."""
    every = ADMIT_EVERY
    published = PublishedPastFuture(reserved=RESERVE, past=workload, admit_every=every)
    ours = WarmPastFuture(reserved=OUR_RESERVE, past=workload, admit_every=every)
    return {
        "past-future": _System(published),
        "shoal": _System(ours, victim=OUR_VICTIM),
        "aggressive": _System(Aggressive(watermark=WATERMARK, admit_every=every)),
        "conservative": _System(Conservative(admit_every=every)),
    }


def _frameworks(workload: str) -> dict[str, _System]:
    """Fig. 9: LightLLM, vLLM, TGI and DeepSpeed-MII by what their schedulers do."""
    return {
        "past-future": _System(PublishedPastFuture(reserved=RESERVE, past=workload)),
        "aggressive": _System(Aggressive(watermark=0.99)),
        "conservative": _System(Conservative()),
        "conservative, split-fuse": _System(Conservative(), batched_tokens=SPLIT_FUSE_TOKENS),
    }


@dataclass(frozen=True, slots=True)
class _Point:
    config: Mapping[str, Value]
    """What is run, for the result."""
    run: Clients
    """The run."""


def run(effort: Effort) -> Result:
    """Fig. 7's models and workloads, and Fig. 9's models on ShareGPT."""
    points = _points(effort)
    found = at_each(effort, NAME, run_clients, [point.run for point in points], heaviest_first=_work)
    rows = [Row(config=point.config, metrics=metrics) for point, metrics in zip(points, found, strict=True)]
    rows = [_compared(row, rows) for row in rows]
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 7 and 9",
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=[*rows, _summary(rows)],
        panels=_panels(rows),
    )


def _points(effort: Effort) -> list[_Point]:
    points = []
    models = effort.choose(tuple(DEPLOYMENTS), ("13B",))
    for model in models:
        for workload in effort.choose(tuple(LONGEST), ("sharegpt-o1", "distribution-3", "sharegpt")):
            figure = 9 if workload == "sharegpt" else 7
            room = requests_that_fit(DEPLOYMENTS[model], workload, LONGEST[workload])
            systems = _frameworks(workload) if figure == 9 else _schedulers(workload)
            for load in effort.choose(LOADS, QUICK_LOADS):
                clients = max(1, round(load * room))
                for policy, system in systems.items():
                    config: dict[str, Value] = {"figure": figure, "model": model, "workload": workload}
                    run = Clients(
                        deployment=DEPLOYMENTS[model],
                        lengths=workload,
                        longest=LONGEST[workload],
                        admission=system.admission,
                        clients=clients,
                        requests=clients * effort.choose(ROUNDS, QUICK_ROUNDS),
                        victim=system.victim,
                        batched_tokens=system.batched_tokens,
                    )
                    points.append(_Point({**config, "clients": clients, "policy": policy}, run))
    return points


def _work(run: Clients) -> float:
    return run.requests * run.longest


def _compared(row: Row, rows: Sequence[Row]) -> Row:
    """With the goodput as a multiple of the better published baseline's; NaN where that has none."""
    if row.config["policy"] not in ("past-future", "shoal"):
        return row
    where = ("figure", "model", "workload", "clients")
    others = [
        float(other.metrics["goodput_tokens_per_s"] or 0)
        for other in rows
        if str(other.config["policy"]).startswith(("aggressive", "conservative"))
        and all(other.config[name] == row.config[name] for name in where)
    ]
    own = float(row.metrics["goodput_tokens_per_s"] or 0)
    over = own / max(others) if max(others) > 0 else math.nan
    return Row(config=row.config, metrics={**row.metrics, "goodput_over_others": over})


def _summary(rows: Sequence[Row]) -> Row:
    """The largest of those multiples over all points, which is what the paper prints."""
    most = max(
        (
            over
            for row in rows
            if row.config["policy"] == "past-future"
            and isinstance(over := row.metrics["goodput_over_others"], float)
            and not math.isnan(over)
        ),
        default=math.nan,
    )
    return Row(
        config={"figure": 7, "model": "all", "workload": "all", "clients": None, "policy": "past-future"},
        metrics={"goodput_over_others": most},
        paper=between("goodput_over_others", 2.0, 3.0),
    )


def _panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """Goodput over clients: a row of panels for each workload, a panel for each model."""
    models = dict.fromkeys(row.config["model"] for row in rows)
    workloads = dict.fromkeys(row.config["workload"] for row in rows)
    return [
        [
            lines(
                rows,
                x="clients",
                y="goodput_tokens_per_s",
                by="policy",
                where={"model": model, "workload": workload},
                x_label="clients",
                y_label="goodput (tokens/s)",
                title=f"{model}, {workload}",
            )
            for model in models
        ]
        for workload in workloads
    ]


ASSUMPTIONS = (
    "From the paper: models, A100-80 (four with NVLink for 70B), workloads; a request counts if its TTFT is "
    "below 10 s (70B: 15 s) and its largest gap below 1.5 s (5 s); on ShareGPT answers end at 2,048 tokens.",
    "Each client sends 6 requests one after another. Figures are over the time from when as many requests "
    "have ended as there are clients until the last one is sent. sla_met: both 99th percentiles are within.",
    "Step times are of the roofline model; KV takes what weights leave of 90% of memory, in blocks of 16; a "
    "step computes at most 8,192 tokens, split-fuse 512.",
    "past-future: 5% in reserve, shoal: 2.4%, both with a window full of the workload's lengths; "
    "aggressive: watermark 95%; conservative: no overcommitment. Fig. 9: frameworks differ in their "
    "schedulers alone, not in the speed of their kernels, and all look at the queue at every step "
    "(aggressive: vLLM, watermark 99%; conservative: TGI; with split-fuse: DeepSpeed-MII).",
    "ShareGPT-o1 is not public: prompts of ShareGPT, outputs of another model that reasons, cut at 8,192.",
    "The paper draws its curves without printing them, but for 2 to 3 times the goodput of other schedulers "
    "under heavy load (abstract): goodput_over_others is against the better of the others at the same point.",
)
DIFFERS: tuple[str, ...] = (
    "Differs: beyond the clients that fill the memory everybody's goodput falls, past-future's too. First "
    "come, first served, each of more clients than fit waits longer than the SLA allows; the paper's curve "
    "levels off there, and it does not say what keeps its queue short. So the margin over aggressive, "
    "which also loses by preemptions, is small here; that over conservative is larger than the paper's.",
)

REPRODUCTION = Reproduction(
    name=NAME,
    paper="Past-Future, Figs. 7 and 9",
    says="goodput under an SLA against the number of clients: Llama-2 7B, 13B and 70B on A100-80s",
    run=run,
)
