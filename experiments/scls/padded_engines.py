"""SCLS's ladder on two real engines of padded batches, with its estimator's error over batches (Fig. 10)."""

from experiments.padded.offline import StaticSetup, StaticShoal
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.scls.ablation import LADDER
from experiments.scls.setup import PAPER, ratio
from experiments.scls.throughput import MARGINS
from experiments.scls.workload import codefuse_requests
from shoal.core import SamplingParams, Service

NAME = "scls-padded"
MODEL = "smollm2"
SCALE = 8
"""Divides lengths, the slice and the longest output: the model is a hundredth of the paper's."""
RATE = 40.0
SECONDS, QUICK_SECONDS = 2.0, 0.4
INTERVAL_S = 0.5
FIXED_BATCH = 8
TOKENS = 1000
"""Prompts are of the first tokens of the vocabulary."""

ASSUMPTIONS = (
    "Two workers of one thread over generate() of transformers: SmolLM2 in float32, padded on the left. A "
    "fixed batch has 8 requests, a slice 16 tokens, an interval 0.5 s; lengths are those of the simulated "
    "experiments divided by 8.",
    "All requests arrive within seconds, faster than any step serves them.",
    "Each request's limit is its true length, because the model would not stop where the trace does: so "
    "batches of whole requests are formed with more knowledge than the paper's, and slices with the same.",
    "Times depend on the machine; the estimate is fitted to eight small batches at the start.",
    "estimate_error is the mean of |estimated - measured| / measured over batches that ran to their limit; "
    "the paper prints errors of 2.3 s (hf) and 0.4 s (ds) over a slice, of 13 s and less.",
)


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    requests = codefuse_requests(RATE, seconds)
    prompts = [
        [(7 * number + at) % TOKENS for at in range(max(1, len(request.prompt) // SCALE))]
        for number, request in enumerate(requests)
    ]
    sampling = [
        SamplingParams(
            temperature=0.0, max_tokens=max(1, (request.true_output_tokens or 1) // SCALE), ignore_eos=True
        )
        for request in requests
    ]
    arrivals_s = [request.arrival_ns / 1e9 for request in requests]
    rows: list[Row] = []
    first: dict[str, Value] = {}
    for step in effort.each(NAME, LADDER):
        setup = StaticSetup(
            preset=step,
            workers=2,
            threads=1,
            slice_tokens=128 // SCALE if step != "sls" else None,
            max_batch=FIXED_BATCH if step in ("sls", "so", "pm") else None,
            interval_s=None if step in ("sls", "so") else INTERVAL_S,
        )
        shoal = StaticShoal(Service(name=MODEL, model=MODEL, dtype="float32"), setup, progress=False)
        report = shoal.generate(prompts, sampling, arrivals_s=arrivals_s, progress=False).report
        metrics: dict[str, Value] = {
            "throughput": report.requests_per_s,
            "mean_response_s": report.response_mean_s,
            "p95_response_s": report.response_p95_s,
            "batch_size": report.mean_batch_size,
            "invalid_tokens": report.tokens.invalid_tokens / max(1, report.finished),
            "pad_tokens": report.tokens.pad_tokens / max(1, report.finished),
            "completion_std_s": report.worker_completion_std_s,
            "estimate_error": report.estimate_error,
        }
        first = first or metrics
        metrics["throughput_over_sls"] = ratio(metrics, first, "throughput")
        printed = {name: value for name, value in MARGINS["hf"].items() if name.startswith("throughput")}
        rows.append(Row(config={"step": step}, metrics=metrics, paper=printed if step == "scls" else None))
    return Result(name=NAME, paper=PAPER + ", Figs. 10 and 15", assumptions=ASSUMPTIONS, rows=rows)


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SCLS, Figs. 10 and 15",
    measures="the ladder on two real engines of padded batches, and the estimator's error",
    run=run,
    real=True,
)
