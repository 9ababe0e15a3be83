"""Goodput under an SLA against the number of clients (Past-Future, Figs. 7 and 9)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.parallel import map_points
from experiments.past_future.admissions import OneAtATime, PublishedPastFuture
from experiments.past_future.clients import (
    ClosedLoopRun,
    ServedModel,
    System,
    requests_that_fit,
    run_closed_loop,
)
from experiments.past_future.setup import ADMIT_EVERY, OUR_RESERVE, OUR_VICTIM, PAPER, drawn_lengths
from experiments.past_future.traces import sharegpt_o1, traces_folder
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between
from shoal.measure import Panel
from shoal.schedule import Aggressive, Conservative, PastFuture

NAME = "past-future-goodput"
REQUESTS, QUICK_REQUESTS = 500, 100
O1_REQUESTS = 1_000
"""Of the artefact's 1,900, so that a run does not take too long."""
RESERVE = 0.05
WATERMARK = 0.99
SPLIT_FUSE_TOKENS = 512

SERVED_MODELS: Mapping[str, ServedModel] = {
    "7B": ServedModel(
        model="llama-2-7b",
        tp=1,
        capacity=120_000,
        ttft_s=10.0,
        gap_s=1.5,
        drop_wait_s=8.0,
        drop_gap_s=1.49,
    ),
    "13B": ServedModel(
        model="llama-2-13b",
        tp=1,
        capacity=64_000,
        ttft_s=10.0,
        gap_s=1.5,
        drop_wait_s=8.0,
        drop_gap_s=1.49,
    ),
    "70B": ServedModel(
        model="llama-2-70b",
        tp=4,
        capacity=550_000,
        ttft_s=15.0,
        gap_s=5.0,
        drop_wait_s=10.0,
        drop_gap_s=4.9,
    ),
}
CLIENTS: Mapping[str, Sequence[int]] = {
    "7B": (10, 20, 40, 60, 100),
    "13B": (10, 20, 40, 60, 100),
    "70B": (100, 300, 500),
}
QUICK_CLIENTS = (20, 40)
DISTRIBUTIONS = ("distribution-1", "distribution-2", "distribution-3")
SHAREGPT_LONGEST = 2048
"""Limit of output tokens."""
SHAREGPT_LOADS = (0.75, 1.0, 1.5)
"""Clients, relative to the requests that fill the memory on average."""
SHAREGPT_ROUNDS = 4
"""Requests of each client."""
BASELINES = ("aggressive", "conservative")


@dataclass(frozen=True, slots=True)
class _Point:
    config: Mapping[str, Value]
    run: ClosedLoopRun


def _schedulers(longest: int) -> dict[str, System]:
    """Fig. 7: the servers of the authors' artefact, and our admission and victims."""
    every = ADMIT_EVERY
    published = PublishedPastFuture(reserved=RESERVE, window=200, initial=6_000, admit_every=every)
    return {
        "past-future": System(admission=published),
        "shoal": System(admission=PastFuture(reserved=OUR_RESERVE, admit_every=every), victim=OUR_VICTIM),
        "aggressive": System(
            admission=Aggressive(watermark=WATERMARK, admit_every=every), drops_running=False
        ),
        "conservative": System(admission=OneAtATime(assumed=longest, admit_every=every)),
    }


def _frameworks() -> dict[str, System]:
    """Fig. 9: the admission and token budget of LightLLM, vLLM, TGI and DeepSpeed-MII."""
    published = PublishedPastFuture(reserved=RESERVE, window=200, initial=6_000)
    return {
        "past-future": System(admission=published),
        "aggressive": System(admission=Aggressive(watermark=WATERMARK)),
        "conservative": System(admission=Conservative()),
        "conservative, split-fuse": System(admission=Conservative(), batched_tokens=SPLIT_FUSE_TOKENS),
    }


def run(effort: Effort) -> Result:
    o1 = sharegpt_o1(traces_folder())
    lengths = {} if isinstance(o1, str) else {"sharegpt-o1": o1[:O1_REQUESTS]}
    count = effort.choose(REQUESTS, QUICK_REQUESTS)
    chosen = effort.choose(DISTRIBUTIONS, DISTRIBUTIONS[:1])
    lengths |= {name: drawn_lengths(name, count) for name in chosen}
    points = _fig7(effort, lengths)
    if not effort.quick:
        points += _fig9()
    found = map_points(effort, NAME, run_closed_loop, [point.run for point in points], heaviest_first=_cost)
    rows = [Row(config=point.config, metrics=metrics) for point, metrics in zip(points, found, strict=True)]
    rows = [_with_ratios(row, rows) for row in rows]
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 7 and 9",
        assumptions=[*ASSUMPTIONS, *([o1] if isinstance(o1, str) else []), *DIFFERS],
        rows=[*rows, *_summary(rows)],
        panels=_panels(rows),
    )


def _fig7(effort: Effort, lengths: Mapping[str, Sequence[tuple[int, int]]]) -> list[_Point]:
    points = []
    for model in effort.choose(tuple(SERVED_MODELS), ("7B",)):
        for workload, pairs in lengths.items():
            some = pairs[: effort.choose(len(pairs), QUICK_REQUESTS)]
            longest = max(output for _, output in pairs)
            for clients in effort.choose(CLIENTS[model], QUICK_CLIENTS):
                for policy, system in _schedulers(longest).items():
                    config: dict[str, Value] = {"figure": 7, "model": model, "workload": workload}
                    run = ClosedLoopRun(
                        served=SERVED_MODELS[model],
                        lengths=some,
                        longest=longest,
                        system=system,
                        clients=clients,
                    )
                    points.append(_Point({**config, "clients": clients, "policy": policy}, run))
    return points


def _fig9() -> list[_Point]:
    points = []
    for model, served in SERVED_MODELS.items():
        fitting = requests_that_fit(served, drawn_lengths("sharegpt", 20_000))
        for load in SHAREGPT_LOADS:
            clients = round(load * fitting)
            for policy, system in _frameworks().items():
                config: dict[str, Value] = {"figure": 9, "model": model, "workload": "sharegpt"}
                run = ClosedLoopRun(
                    served=served,
                    lengths=drawn_lengths("sharegpt", clients * SHAREGPT_ROUNDS),
                    longest=SHAREGPT_LONGEST,
                    system=system,
                    clients=clients,
                )
                points.append(_Point({**config, "clients": clients, "policy": policy}, run))
    return points


def _cost(run: ClosedLoopRun) -> float:
    return len(run.lengths) * run.clients


def _goodput(row: Row) -> float:
    return float(row.metrics["goodput_tokens_per_s"] or 0)


def _with_ratios(row: Row, rows: Sequence[Row]) -> Row:
    """Adds the goodput relative to its largest over all numbers of clients, and to that of the baselines."""
    where = ("figure", "model", "workload")
    alike = [other for other in rows if all(other.config[name] == row.config[name] for name in where)]
    most = max(_goodput(other) for other in alike if other.config["policy"] == row.config["policy"])
    ratios: dict[str, Value] = {"of_largest": _goodput(row) / most if most else 0.0}
    if row.config["policy"] in ("past-future", "shoal"):
        for other in alike:
            policy = other.config["policy"]
            if policy in BASELINES and other.config["clients"] == row.config["clients"] and _goodput(other):
                ratios[f"over_{policy}"] = _goodput(row) / _goodput(other)
    return Row(config=row.config, metrics={**row.metrics, **ratios})


def _summary(rows: Sequence[Row]) -> list[Row]:
    """The largest ratios of past-future over all points of Fig. 7, which is what the paper prints."""
    own = [row for row in rows if row.config["policy"] == "past-future" and row.config["figure"] == 7]
    config: dict[str, Value] = {"figure": 7, "model": "all", "workload": "all", "clients": None}
    summary = []
    for baseline in BASELINES:
        metric = f"over_{baseline}"
        most = max(float(row.metrics.get(metric) or 0) for row in own)
        summary.append(
            Row(
                config={**config, "policy": "past-future"},
                metrics={metric: most},
                paper=between(metric, 2.0, 3.0),
            )
        )
    return summary


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
    "From the authors' artefact (github.com/WuSiYu/lightllm-ae): clients send their next request as soon as "
    "the last one has ended, and a request that failed is sent again behind all others; the server drops who "
    "has waited longer than 8 s (70B: 10 s), and running requests after a gap of 1.49 s (4.9 s), the "
    "aggressive server none of these; goodput is prompt and output tokens of all 500 requests (o1: the first "
    "1,000 of its 1,900) "
    "over the time until all have succeeded; 120,000, 64,000 and 550,000 tokens of KV; at most 18,000 tokens "
    "a step.",
    "past-future: 5% in reserve, a history of 200 that starts half full of 6,000 tokens, 5 interpolated "
    "draws (the artefact). aggressive: a watermark of 99%. conservative: the workload's longest output is "
    "reserved, and one request admitted at a time. shoal: 2.4% in reserve, a new service, victims large and "
    "young. All look at the queue every ten steps.",
    "Step times are of the roofline model, and a step has prompts and decodes together.",
    "Fig. 9, for which there is no artefact: the same clients and drops; frameworks differ in their "
    "schedulers alone, not in the speed of their kernels, and all admit at every step (aggressive: vLLM; "
    "conservative: TGI; with split-fuse, 512 tokens a step: DeepSpeed-MII).",
    "The paper draws its curves without printing them, but for 2 to 3 times the goodput of other schedulers "
    "under heavy load (abstract).",
)
DIFFERS: tuple[str, ...] = (
    "Differs: over conservative the margin is large on ShareGPT-o1 alone, whose longest answer is five times "
    "the mean; on the distributions it is below 1.1.",
)

REPRODUCTION = Reproduction(
    name=NAME,
    paper="Past-Future, Figs. 7 and 9",
    measures="goodput under an SLA against the number of clients: Llama-2 7B, 13B and 70B on A100-80s",
    run=run,
)
