"""UELLM's batching and device map together against S3 and Morphling (Fig. 5)."""

from collections.abc import Mapping
from statistics import fmean

from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between
from experiments.uellm.systems import (
    HELR,
    SEARCHED,
    SYSTEMS,
    TEST_REQUESTS,
    BatchingSystem,
    MappedModel,
    Served,
    mapped_models,
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
"""Systems with margins; the paper prints them for UELLM (``ua``)."""

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
    "From the paper: ChatGLM2-6B on the four RTX 3090 of Table 2, SLOs uniform over 1 to 350 s, means of "
    "five repetitions, output lengths known by bucket to 99.51%. As in `uellm-batching`, all requests are "
    "queued at the start, with its lengths and its times, which a device map makes longer.",
    "As in `uellm-deployment`, the speed of devices follows their power limits. All are free: HELR takes the "
    "fastest alone. The default map of S3 and UB is assumed to be even over all four.",
    "Largest batches, which the paper does not print: 16 for S3 and FIFO, as for `hf` in SCLS; 64 for UELLM, "
    "which sets the size itself. `s3-memory` is bounded by memory alone.",
    "UD and Morphling do not batch by SLO or length: FIFO.",
    "Morphling is modelled as a search by stress tests: even maps over 1 to 4 devices, each tested with "
    "{tests} questions; together {tests_s:.0f} s, in which no request is answered. They count in its latency "
    "and throughput, but not in its SLO attainment. After its tests it equals UD.",
    "`ua-odbs`: HELR with ODBS, the paper's batching by length alone. `shoal`: HELR with our default "
    "scheduler, continuous batching. Neither is in the paper.",
    "`alone`: every request by itself on HELR's map; no system can meet more SLOs.",
    "Utilisation: the share of a pass in which a device in use computes.",
)
DIFFERS = (
    "Differs: UA does not meet all SLOs. They are drawn from 1 s upwards, and some are shorter than the "
    "answer takes alone.",
    "Differs: UA is not 1.9 times as fast as S3 here. It batches by SLO first, so lengths in a batch "
    "are hardly closer than chance (see `uellm-batching`); over S3 it gains what the map gains. ODBS gains "
    "more, continuous batching most: with it the paper's margins over S3 are reached.",
    "Differs: the margins over Morphling come from its stress tests, and are larger with fewer requests; "
    "without the tests it equals UD.",
)


def run(effort: Effort) -> Result:
    seeds = effort.choose(SEEDS, range(1))
    mapped = mapped_models()
    rows = []
    for waiting in effort.each(NAME, WAITING):
        found = {
            name: _metrics(system, mapped[system.device_map], waiting, seeds)
            for name, system in SYSTEMS.items()
        }
        attained = fmean(mapped[HELR].attainment_alone(question_requests(waiting, seed)) for seed in seeds)
        rows.append(Row(config={"waiting": waiting, "system": "alone"}, metrics={"slo_attainment": attained}))
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
    facts = {"tests": TEST_REQUESTS, "tests_s": mapped[SEARCHED].tests_s}
    return Result(
        name=NAME,
        paper=PAPER,
        assumptions=[line.format_map(facts) for line in ASSUMPTIONS] + list(DIFFERS),
        rows=rows,
        panels=[_panels(rows)],
    )


def _metrics(system: BatchingSystem, mapped: MappedModel, waiting: int, seeds: range) -> dict[str, float]:
    runs = [mapped.serve(system, question_requests(waiting, seed)) for seed in seeds]
    tests_s = mapped.tests_s

    def tokens_per_s(served: Served) -> float:
        return served.tokens / (served.duration_s + tests_s)

    return {
        "mean_latency_s": fmean(served.latency_s for served in runs) + tests_s,
        "slo_attainment": fmean(served.attainment for served in runs),
        "tokens_per_s": fmean(map(tokens_per_s, runs)),
        "utilisation": mapped.utilisation,
    }


def _margins(ours: Mapping[str, float], found: Mapping[str, Mapping[str, float]]) -> dict[str, Value]:
    margins: dict[str, Value] = {}
    for base in BASELINES:
        margins[_CUT + base] = 1 - ours["mean_latency_s"] / found[base]["mean_latency_s"]
        margins[_OVER + base] = ours["tokens_per_s"] / found[base]["tokens_per_s"]
    return {**margins, "utilisation_over_s3": ours["utilisation"] / found["s3"]["utilisation"]}


def _panels(rows: list[Row]) -> list[Panel]:
    """Without Morphling, whose tests would hide all other latencies."""
    served = [row for row in rows if row.config["system"] not in ("alone", "morphling")]
    shown = {
        "mean_latency_s": "mean latency (s)",
        "slo_attainment": "share within the SLO",
        "tokens_per_s": "tokens/s",
    }
    return [
        line_panel(
            served, x="waiting", y=metric, by="system", where={}, x_label="queued requests", y_label=label
        )
        for metric, label in shown.items()
    ]


REPRODUCTION = Reproduction(
    name=NAME,
    paper="UELLM, Fig. 5",
    measures="UELLM's device map and batching together against S3 and Morphling",
    run=run,
)
