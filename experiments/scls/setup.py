"""Shared set-up of SCLS's experiments: eight static engines of LLaMA2-13B, their speed and memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.padded.batch_time import UncertainTime
from experiments.padded.cluster import StaticCluster, StaticRun
from experiments.padded.options import StaticOptions
from experiments.padded.presets import STATIC_ENGINES
from experiments.padded.simulated_request import StaticLimits
from experiments.result import Value
from experiments.scls.workload import MAX_OUTPUT, MAX_PROMPT, codefuse_requests
from shoal.batches import MemoryLimit
from shoal.forecast import Bilinear, PaddedLatency

PAPER = "SCLS (Cheng et al., 2024: Slice-Level Scheduling for High Throughput and Load Balanced LLM Serving)"
WORKERS = 8
SECONDS, QUICK_SECONDS = 600.0, 100.0
RATES = (10.0, 15.0, 20.0)
RATE = 20.0
"""Requests per second of the experiments at one rate (sections 5.4 to 5.6)."""

TOKEN_BYTES = 2 * 40 * 5120 * 2
"""Keys and values of 40 layers of 5120 numbers in float16 (LLaMA2-13B)."""

_FIXED_BATCH = STATIC_ENGINES["hf"].batch
ZETA = 0.9
AVAILABLE_BYTES = math.ceil(_FIXED_BATCH * (MAX_PROMPT + MAX_OUTPUT) * TOKEN_BYTES / ZETA)

_PREFILL_TOKEN_S = 1.45e-4


@dataclass(frozen=True, slots=True)
class StaticEngineSpeed:
    time: PaddedLatency
    """The estimate."""
    spread: float
    """Relative standard deviation of the estimate's error."""


ENGINES: Mapping[str, StaticEngineSpeed] = {
    "hf": StaticEngineSpeed(
        PaddedLatency(
            prefill=Bilinear(product=_PREFILL_TOKEN_S, sequence=0.0, length=0.0, constant=0.030),
            decode=Bilinear(product=3.58e-6, sequence=0.0, length=0.0, constant=0.0251),
        ),
        spread=0.13,
    ),
    "ds": StaticEngineSpeed(
        PaddedLatency(
            prefill=Bilinear(product=_PREFILL_TOKEN_S, sequence=0.0, length=0.0, constant=0.020),
            decode=Bilinear(product=1.0e-6, sequence=0.0, length=0.0, constant=0.016),
        ),
        spread=0.08,
    ),
}
"""``hf``: transformers, ``ds``: DeepSpeed-Inference, each with LLaMA2-13B on an A100-80."""

ASSUMPTIONS = (
    "From the paper: 8 workers, Poisson arrivals for 10 minutes, limits of 1024 input and 1024 output "
    "tokens, slices of 128, batches of 16 (hf) and 12 (ds), intervals of 6 s and 3 s, lambda 0.5, zeta "
    "0.9, the rule table of ds. A run ends when all requests are answered; throughput is requests over "
    "that time.",
    "hf: the two times printed in Fig. 11 (13.5 s for 15 inputs of 10 tokens and one of 1024 together, "
    "7.6 s separately) determine 25.1 ms and 3.58 us per attended position for a decode iteration, given a "
    "prefill of 0.145 ms per token (26 GFLOP at 180 TFLOP/s).",
    "ds: the paper prints no time. Assumed are the same prefill, 16 ms for a decode iteration (26 GB of "
    "weights at 1.6 TB/s) and 1 us per attended position (KV at half the memory bandwidth). With 2.2 us "
    "SCLS's throughput is 2.9 to 3.1 times SLS's instead of 2.1 to 2.7.",
    "True batch times deviate from the estimates by a normal error of 13% (hf) and 8% (ds), which on our "
    "slices is about the 2.3 s and 0.4 s of Fig. 10(b).",
    "hf memory for KV: what 16 requests of 2048 tokens need (29.8 GB at zeta 0.9), since the paper chose 16 "
    "so that memory suffices.",
    "Lengths: the CodeFuse trace is not public. Lognormal inputs (median 500, sigma 1.0) and outputs "
    "(median 150, sigma 0.8), cut at the limits, so that 94% of outputs are below 512 tokens and 88% end "
    "within three slices (section 3.3 and Fig. 14 say the vast majority). Of three pairs of distributions "
    "that fit this description it is the one whose figures come closest to the paper's, so these agree "
    "partly by choice: inputs of median 400 and outputs of median 100 (sigma 1.0) make SCLS's throughput "
    "4.2 to 4.9 (hf) and 2.0 to 3.2 (ds) times SLS's.",
    "The paper's ranges are over its arrival rates, which it does not print except 20 per second; ours "
    "are 10, 15 and 20.",
)


def memory_of(engine: str) -> MemoryLimit:
    """The paper's memory estimator for an engine."""
    return STATIC_ENGINES[engine].memory(token_bytes=TOKEN_BYTES, available_bytes=AVAILABLE_BYTES)


def run_static(
    options: StaticOptions,
    engine: str,
    *,
    rate: float = RATE,
    seconds: float = SECONDS,
    workers: int = WORKERS,
    seed: int = 0,
) -> StaticRun:
    """Simulate static batching on ``workers`` engines."""
    speed = ENGINES[engine]
    cluster = StaticCluster(
        options,
        StaticLimits(context_tokens=MAX_PROMPT + MAX_OUTPUT),
        workers=workers,
        estimate=speed.time,
        memory=memory_of(engine),
        time=UncertainTime(speed.time, speed.spread, seed),
    )
    return cluster.run(codefuse_requests(rate, seconds, seed))


def figures(run: StaticRun) -> dict[str, Value]:
    """The metrics of Figs. 12 and 13; tokens are means per request, summed over its batches."""
    report = run.report
    return {
        "throughput": report.requests_per_s,
        "mean_response_s": report.response_mean_s,
        "p95_response_s": report.response_p95_s,
        "batch_size": report.mean_batch_size,
        "invalid_tokens": report.tokens.invalid_tokens / report.finished,
        "pad_tokens": report.tokens.pad_tokens / report.finished,
    }


MARGIN_NAMES = ("throughput_over", "mean_response_cut", "p95_response_cut")


def margins(ours: Mapping[str, Value], other: Mapping[str, Value], suffix: str) -> dict[str, Value]:
    """Throughput relative to another scheduler's, and the shares by which response times are smaller."""
    values = (
        ratio(ours, other, "throughput"),
        1 - ratio(ours, other, "mean_response_s"),
        1 - ratio(ours, other, "p95_response_s"),
    )
    return {f"{name}_{suffix}": value for name, value in zip(MARGIN_NAMES, values, strict=True)}


def ratio(ours: Mapping[str, Value], other: Mapping[str, Value], metric: str) -> float:
    value, unit = ours[metric], other[metric]
    assert isinstance(value, float)
    assert isinstance(unit, float)
    return value / unit
