"""Latency, SLO attainment and throughput of UELLM's batching algorithms (Figs. 4a, 4b and 5b)."""

from dataclasses import replace
from statistics import fmean

from experiments.padded.cluster import StaticCluster, StaticRun
from experiments.padded.presets import static_preset
from experiments.padded.simulated_request import StaticLimits
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.uellm.workload import MAX_OUTPUT, MAX_PROMPT, BucketPredictor, question_requests
from shoal.batches import MemoryByBytes
from shoal.core import attainment, met
from shoal.forecast import Bilinear, PaddedLatency
from shoal.measure import Panel

NAME = "uellm-batching"
PAPER = "UELLM (He et al., 2024: A Unified and Efficient Approach for LLM Inference Serving), Figs. 4 and 5"
BATCHERS = {
    "fifo": "fifo",
    "s3": "s3",
    "odbs": "odbs",
    "slo-dbs": "slo-dbs",
    "slo-odbs": "uellm",
    "slo-odbs-literal": "uellm-literal",
}
"""Our presets, by the paper's names."""

WAITING = (64, 128, 256)
LARGEST = (16, 32)
SEEDS = range(5)
ACCURACY = 0.9951
UB_ATTAINMENT = 0.874

TIME = PaddedLatency(
    prefill=Bilinear(product=3.6e-4, sequence=0.0, length=0.0, constant=0.044),
    decode=Bilinear(product=1.4e-7, sequence=3.6e-4, length=0.0, constant=0.044),
)
"""ChatGLM2-6B in four pipeline stages on RTX 3090, without overlap."""

MEMORY = MemoryByBytes(token_bytes=4 * 28 * 4096, available_bytes=80 * 10**9)

ASSUMPTIONS = (
    "From the paper: ChatGLM2-6B on four RTX 3090 that form one engine, SLOs uniform over 1 to 350 s, "
    "means of five repetitions, KV of 4 x layers x hidden size bytes per token, output lengths known by "
    "bucket to 99.51%.",
    "The paper prints neither the number of requests nor their arrivals. Its algorithm takes a list, so all "
    "are queued at the start: 64, 128 and 256.",
    "Lengths: lognormal inputs of median 30 and outputs of median 150 (sigma 0.8), both at most 512; ten "
    "buckets.",
    "Times: 44 ms for a decode iteration (22.55 tokens/s of Table 1's best device map), 0.36 ms per "
    "computed token (12.5 GFLOP at 35 TFLOP/s), 0.14 us per attended position (grouped keys and values, "
    "copied at each iteration).",
    "Every batcher, S3 too, has the same largest batch. FIFO predicts nothing and runs a batch until all of "
    "its requests have ended.",
    "The paper prints 87.4% for UB, SLO-ODBS alone; its other figures (latency -72 to -90%, throughput "
    "1.9 to 5.0 times) are of batching and deployment together against S3 and Morphling, and are not "
    "compared here.",
)
DIFFERS = (
    "Differs: SLO-ODBS does not have the latency of ODBS. It sorts requests by SLO, so the lengths in a batch"
    " are little closer than chance, and its threshold closes batches at half their largest size when SLOs "
    "are above the mean; decoding costs nearly the same for half a batch. With twice the largest batch it "
    "has FIFO's mean size, 16 to 25% less latency and far fewer violations than FIFO.",
    "Differs: serving the most urgent first meets the most SLOs as long as nearly all can be met, and almost "
    "none with 256 queued: every request is then served too late. ODBS serves the shortest first and loses "
    "least.",
    "Differs: S3 is not the worst. In batches of at most 16, its order by predicted memory is one by length, "
    "like that of ODBS, but with the longest first.",
)


def run(effort: Effort) -> Result:
    seeds = effort.choose(SEEDS, range(1))
    points = [(n, largest, name) for n in WAITING for largest in LARGEST for name in BATCHERS]
    rows = []
    for waiting, largest, name in effort.each(NAME, points):
        runs = [_serve(BATCHERS[name], waiting, largest, seed) for seed in seeds]
        config: dict[str, Value] = {"waiting": waiting, "max_batch": largest, "batcher": name}
        metrics: dict[str, Value] = {
            "mean_latency_s": fmean(served.report.response_mean_s for served in runs),
            "p95_latency_s": fmean(served.report.response_p95_s for served in runs),
            "slo_attainment": fmean(
                attainment(met(row, row.slo) for row in served.requests) for served in runs
            ),
            "tokens_per_s": fmean(served.report.tokens_per_s for served in runs),
            "batch_size": fmean(served.report.mean_batch_size for served in runs),
            "invalid_tokens": fmean(served.report.tokens.invalid_tokens / waiting for served in runs),
        }
        paper = {"slo_attainment": UB_ATTAINMENT} if name == "slo-odbs" else None
        rows.append(Row(config=config, metrics=metrics, paper=paper))
    return Result(
        name=NAME,
        paper=PAPER,
        assumptions=[*ASSUMPTIONS, *DIFFERS],
        rows=rows,
        panels=[_panels(rows, largest) for largest in LARGEST],
    )


def _serve(preset: str, waiting: int, largest: int, seed: int) -> StaticRun:
    cluster = StaticCluster(
        replace(static_preset(preset), max_batch=largest),
        StaticLimits(context_tokens=MAX_PROMPT + MAX_OUTPUT),
        workers=1,
        estimate=TIME,
        memory=MEMORY,
        predictor=BucketPredictor(ACCURACY),
    )
    return cluster.run(question_requests(waiting, seed))


def _panels(rows: list[Row], largest: int) -> list[Panel]:
    shown = {
        "mean_latency_s": "mean latency (s)",
        "slo_attainment": "share within the SLO",
        "tokens_per_s": "tokens/s",
    }
    return [
        line_panel(
            rows,
            x="waiting",
            y=metric,
            by="batcher",
            where={"max_batch": largest},
            x_label="queued requests",
            y_label=label,
            title=f"batches of at most {largest}",
        )
        for metric, label in shown.items()
    ]


REPRODUCTION = Reproduction(
    name=NAME,
    paper="UELLM, Figs. 4a, 4b and 5b",
    measures="latency, SLO attainment and throughput of FIFO, S3, ODBS, SLO-DBS and SLO-ODBS",
    run=run,
)
