"""Goodput under an SLA against the number of clients (Past-Future, Figs. 7 and 9)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.parallel import map_points
from experiments.past_future.clients import (
    BATCHED_TOKENS,
    ClosedLoopRun,
    ServedModel,
    requests_that_fit,
    run_closed_loop,
)
from experiments.past_future.setup import (
    ADMIT_EVERY,
    OUR_RESERVE,
    OUR_VICTIM,
    PAPER,
    PublishedPastFuture,
    WarmPastFuture,
)
from experiments.pictures import line_panel
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

SERVED_MODELS: Mapping[str, ServedModel] = {
    "7B": ServedModel("llama-2-7b", 1, 10.0, 1.5),
    "13B": ServedModel("llama-2-13b", 1, 10.0, 1.5),
    "70B": ServedModel("llama-2-70b", 4, 15.0, 5.0),
}
LONGEST: Mapping[str, int] = {
    "sharegpt-o1": 8192,
    "distribution-1": 4096,
    "distribution-2": 5120,
    "distribution-3": 4096,
    "sharegpt": 2048,
}
"""Limit of output tokens, by workload."""
LOADS = (0.5, 0.75, 0.9, 1.0, 1.15, 1.4)
"""Clients, relative to the requests that fill the memory on average."""
QUICK_LOADS = (1.0,)


@dataclass(frozen=True, slots=True)
class _System:
    admission: Admission
    batched_tokens: int = BATCHED_TOKENS
    """Token budget of a step."""
    victim: str = "newest"


def _schedulers(workload: str) -> dict[str, _System]:
    """Fig. 7: admission policies in one framework."""
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
    """Fig. 9: the admission and token budget of LightLLM, vLLM, TGI and DeepSpeed-MII."""
    return {
        "past-future": _System(PublishedPastFuture(reserved=RESERVE, past=workload)),
        "aggressive": _System(Aggressive(watermark=0.99)),
        "conservative": _System(Conservative()),
        "conservative, split-fuse": _System(Conservative(), batched_tokens=SPLIT_FUSE_TOKENS),
    }


@dataclass(frozen=True, slots=True)
class _Point:
    config: Mapping[str, Value]
    run: ClosedLoopRun


def run(effort: Effort) -> Result:
    points = _points(effort)
    found = map_points(effort, NAME, run_closed_loop, [point.run for point in points], heaviest_first=_cost)
    rows = [Row(config=point.config, metrics=metrics) for point, metrics in zip(points, found, strict=True)]
    rows = [_with_goodput_ratio(row, rows) for row in rows]
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 7 and 9",
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=[*rows, _summary(rows)],
        panels=_panels(rows),
    )


def _points(effort: Effort) -> list[_Point]:
    points = []
    models = effort.choose(tuple(SERVED_MODELS), ("13B",))
    for model in models:
        for workload in effort.choose(tuple(LONGEST), ("sharegpt-o1", "distribution-3", "sharegpt")):
            figure = 9 if workload == "sharegpt" else 7
            fitting = requests_that_fit(SERVED_MODELS[model], workload, LONGEST[workload])
            systems = _frameworks(workload) if figure == 9 else _schedulers(workload)
            for load in effort.choose(LOADS, QUICK_LOADS):
                clients = max(1, round(load * fitting))
                for policy, system in systems.items():
                    config: dict[str, Value] = {"figure": figure, "model": model, "workload": workload}
                    run = ClosedLoopRun(
                        served=SERVED_MODELS[model],
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


def _cost(run: ClosedLoopRun) -> float:
    return run.requests * run.longest


def _with_goodput_ratio(row: Row, rows: Sequence[Row]) -> Row:
    """Adds the goodput relative to the best published baseline; NaN if that has none."""
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
    ratio = own / max(others) if max(others) > 0 else math.nan
    return Row(config=row.config, metrics={**row.metrics, "goodput_over_others": ratio})


def _summary(rows: Sequence[Row]) -> Row:
    """The largest ratio over all points, which is what the paper prints."""
    most = max(
        (
            ratio
            for row in rows
            if row.config["policy"] == "past-future"
            and isinstance(ratio := row.metrics["goodput_over_others"], float)
            and not math.isnan(ratio)
        ),
        default=math.nan,
    )
    return Row(
        config={"figure": 7, "model": "all", "workload": "all", "clients": None, "policy": "past-future"},
        metrics={"goodput_over_others": most},
        paper=between("goodput_over_others", 2.0, 3.0),
    )


def _panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """Goodput over clients, by workload (rows) and model (columns)."""
    models = dict.fromkeys(row.config["model"] for row in rows)
    workloads = dict.fromkeys(row.config["workload"] for row in rows)
    return [
        [
            line_panel(
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
    "have ended as there are clients until the last one is sent. sla_met: both 99th percentiles are within "
    "the SLA.",
    "Step times are of the roofline model; KV takes what weights leave of 90% of memory, in blocks of 16; a "
    "step computes at most 8,192 tokens, split-fuse 512.",
    "past-future: 5% in reserve, shoal: 2.4%, both with a window full of the workload's lengths; "
    "aggressive: watermark 95%; conservative: no overcommitment. Fig. 9: frameworks differ in their "
    "schedulers alone, not in the speed of their kernels, and all admit at every step "
    "(aggressive: vLLM, watermark 99%; conservative: TGI; with split-fuse: DeepSpeed-MII).",
    "ShareGPT-o1 is not public: prompts of ShareGPT, outputs of another model that reasons, cut at 8,192.",
    "The paper draws its curves without printing them, but for 2 to 3 times the goodput of other schedulers "
    "under heavy load (abstract): goodput_over_others is against the better of the others at the same point.",
)
DIFFERS: tuple[str, ...] = (
    "Differs: with more clients than fill the memory, the goodput of all systems falls, past-future's too: "
    "in order of arrival, requests wait longer than the SLA allows. The paper's curve levels off there, and "
    "it does not say what keeps its queue short. So the margin over aggressive, which also loses by "
    "preemptions, is small here; that over conservative is larger than the paper's.",
)

REPRODUCTION = Reproduction(
    name=NAME,
    paper="Past-Future, Figs. 7 and 9",
    measures="goodput under an SLA against the number of clients: Llama-2 7B, 13B and 70B on A100-80s",
    run=run,
)
