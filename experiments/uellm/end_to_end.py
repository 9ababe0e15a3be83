"""UELLM as a whole against S3 and Morphling (its Fig. 5)."""

from collections.abc import Mapping
from statistics import fmean

from experiments.pictures import lines
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between
from experiments.uellm.systems import (
    HELR,
    SEARCHED,
    SYSTEMS,
    TEST_REQUESTS,
    Deployment,
    Served,
    System,
    deployments,
)
from experiments.uellm.workload import question_requests
from shoal.measure import Panel

NAME = "uellm-end-to-end"
PAPER = "UELLM (He et al., 2024: A Unified and Efficient Approach for LLM Inference Serving), Fig. 5"
WAITING = (64, 128, 256)
SEEDS = range(5)
ATTAINMENT = {"ub": 0.874, "ua": 1.0}
BASELINES = ("s3", "morphling")
COMPARED = ("ua", "ua-literal", "ua-odbs", "shoal")
"""Systems whose margins are given; the paper prints them for UELLM as a whole."""

_CUT, _OVER = "latency_cut_", "throughput_over_"
MARGINS: Mapping[str, Value] = {
    **between(_CUT + "s3", 0.723, 0.903),
    **between(_CUT + "morphling", 0.723, 0.903),
    **between(_OVER + "s3", 1.92, 4.98),
    **between(_OVER + "morphling", 1.92, 4.98),
    **between("utilisation_over_s3", 1.2, 4.1),
}
"""Section 5.3 prints one range over both baselines."""

ASSUMPTIONS = (
    "From the paper: ChatGLM2-6B on the four RTX 3090 of Table 2, goals uniform over 1 to 350 s, means of "
    "five repetitions, output lengths known by bucket to 99.51%. As in `uellm-batching`, all requests wait "
    "at the beginning, with its stand-in for lengths and its times, which a device map makes longer.",
    "As in `uellm-deployment`, devices are as fast as their power limits say. All are free: HELR takes the "
    "fastest alone. The default map of S3 and UB is taken to be even over all four.",
    "Largest batches, which the paper does not print: 16 for S3 and FIFO, as transformers' engine in SCLS; "
    "64 for UELLM, which sets the size itself. `s3-memory` is bounded by memory alone.",
    "UD and Morphling do not batch by goals or lengths: FIFO.",
    "Morphling stands for a search by stress tests: even maps over 1 to 4 devices, each tested with {tests} "
    "questions; together {tests_s:.0f} s, in which requests wait and nothing is answered. They count in its "
    "latency and throughput, and not in its goals kept. After its tests it is what UD is.",
    "`ua-odbs`: HELR with ODBS, the paper's batching by length alone. `shoal`: HELR with our scheduler as it "
    "is by default, continuous batching. Neither is in the paper.",
    "`alone`: every request by itself on HELR's map; no system keeps more goals than that.",
    "Utilisation: the share of a pass in which a device in use computes.",
)
DIFFERS = (
    "Differs: UA does not keep all goals. With goals drawn from 1 s upwards, some are shorter than the "
    "answer takes alone.",
    "Differs: UA is not 1.9 times as fast as S3 here. Its batching looks at goals first, so lengths that "
    "meet in a batch are hardly closer than chance (see `uellm-batching`); against S3 it gains what the map "
    "gains. ODBS gains more, continuous batching most: with it the paper's margins over S3 are reached.",
    "Differs: against Morphling the margins are those of its stress tests, and larger the fewer requests "
    "there are to share them; without them it is UD.",
)


def run(effort: Effort) -> Result:
    """Every system at every number of waiting requests."""
    seeds = effort.choose(SEEDS, range(1))
    on = deployments()
    rows = []
    for waiting in effort.each(NAME, WAITING):
        found = {
            name: _metrics(system, on[system.device_map], waiting, seeds) for name, system in SYSTEMS.items()
        }
        kept = fmean(on[HELR].kept_alone(question_requests(waiting, seed)) for seed in seeds)
        rows.append(Row(config={"waiting": waiting, "system": "alone"}, metrics={"slo_attainment": kept}))
        for name, metrics in found.items():
            compared = name in COMPARED
            paper: dict[str, Value] = {"slo_attainment": ATTAINMENT[name]} if name in ATTAINMENT else {}
            rows.append(
                Row(
                    config={"waiting": waiting, "system": name},
                    metrics={**metrics, **(_margins(metrics, found) if compared else {})},
                    paper={**paper, **(MARGINS if compared else {})} or None,
                )
            )
    facts = {"tests": TEST_REQUESTS, "tests_s": on[SEARCHED].tests_s}
    return Result(
        name=NAME,
        paper=PAPER,
        assumptions=[line.format_map(facts) for line in ASSUMPTIONS] + list(DIFFERS),
        rows=rows,
        panels=[_panels(rows)],
    )


def _metrics(system: System, deployment: Deployment, waiting: int, seeds: range) -> dict[str, float]:
    runs = [deployment.serve(system, question_requests(waiting, seed)) for seed in seeds]
    tests_s = deployment.tests_s

    def tokens_per_s(served: Served) -> float:
        return served.tokens / (served.duration_s + tests_s)

    return {
        "mean_latency_s": fmean(served.latency_s for served in runs) + tests_s,
        "slo_attainment": fmean(served.attainment for served in runs),
        "tokens_per_s": fmean(map(tokens_per_s, runs)),
        "utilisation": deployment.utilisation,
    }


def _margins(ours: Mapping[str, float], found: Mapping[str, Mapping[str, float]]) -> dict[str, Value]:
    margins: dict[str, Value] = {}
    for base in BASELINES:
        margins[_CUT + base] = 1 - ours["mean_latency_s"] / found[base]["mean_latency_s"]
        margins[_OVER + base] = ours["tokens_per_s"] / found[base]["tokens_per_s"]
    return {**margins, "utilisation_over_s3": ours["utilisation"] / found["s3"]["utilisation"]}


def _panels(rows: list[Row]) -> list[Panel]:
    """Without Morphling, which is UD but for tests that would hide all other latencies."""
    served = [row for row in rows if row.config["system"] not in ("alone", "morphling")]
    shown = {
        "mean_latency_s": "mean latency (s)",
        "slo_attainment": "share within its goal",
        "tokens_per_s": "tokens/s",
    }
    return [
        lines(
            served, x="waiting", y=metric, by="system", where={}, x_label="requests that wait", y_label=label
        )
        for metric, label in shown.items()
    ]


REPRODUCTION = Reproduction(
    name=NAME,
    paper="UELLM, Fig. 5",
    says="UELLM's device map and batching together against S3 and Morphling",
    run=run,
)
"""UELLM as a whole."""
