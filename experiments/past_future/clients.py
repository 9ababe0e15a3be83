"""Closed-loop runs of Past-Future's goodput experiments: clients, one model on A100-80s, an SLA."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.past_future.setup import options_of, synthetic_requests
from experiments.result import Value
from shoal.core.metrics import percentile
from shoal.forecast import DEVICE_SPECS, MODEL_SPECS, RooflineTimes, kv_tokens
from shoal.measure import RequestRow, RunRecord
from shoal.schedule import Admission
from shoal.simulate import ClosedLoop, EngineSpec, ServiceSpec, Simulation, Watch, token_layout
from shoal.workload import LENGTHS

BLOCK_TOKENS = 16
BATCHED_TOKENS = 8192
MEMORY_SHARE = 0.9
PERCENT = 99
_SAMPLE = 20_000


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on A100-80s with NVLink, and its SLA."""

    model: str
    tp: int
    ttft_s: float
    """Limit of the SLA."""
    gap_s: float
    """Limit of the SLA for the largest inter-token latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopRun:
    served: ServedModel
    lengths: str
    """Name of a distribution."""
    longest: int
    """Limit of output tokens."""
    admission: Admission
    clients: int
    requests: int
    """Of all clients together."""
    victim: str = "newest"
    batched_tokens: int = BATCHED_TOKENS
    """Token budget of a step."""


def requests_that_fit(served: ServedModel, lengths: str, longest: int) -> float:
    """How many requests fill the memory at a random moment of a long run without a queue.

    A request is found running with a probability proportional to its output length.
    """
    prompts, outputs = LENGTHS[lengths].sample(_SAMPLE, 0)
    outputs = np.minimum(outputs, longest)
    held = (outputs * (prompts + outputs / 2)).sum() / outputs.sum()
    return _kv_tokens(served) / float(held)


def _kv_tokens(served: ServedModel) -> int:
    return kv_tokens(MODEL_SPECS[served.model], DEVICE_SPECS["a100-80"], served.tp, MEMORY_SHARE)


def run_closed_loop(run: ClosedLoopRun) -> dict[str, Value]:
    """Simulate one run; its figures without the phases in which not all clients are active."""
    served = run.served
    model, device = MODEL_SPECS[served.model], DEVICE_SPECS["a100-80"]
    engine = EngineSpec(
        services={model.name: ServiceSpec(times=RooflineTimes(model, device, served.tp))},
        layout=token_layout(_kv_tokens(served) // BLOCK_TOKENS, BLOCK_TOKENS, model.name),
        scheduler=replace(options_of(run.admission, run.victim), max_batched_tokens=run.batched_tokens),
        prefix_caching=False,
    )
    requests = synthetic_requests(run.lengths, run.requests, 0, run.longest, model.name)
    watch = Watch(sample_s=60.0)
    return figures(Simulation([engine], ClosedLoop(requests, run.clients), watch=watch).run(), run)


def figures(record: RunRecord, run: ClosedLoopRun) -> dict[str, Value]:
    """Goodput and its parts, per second of the time in which all clients are active.

    It begins when as many requests have ended as there are clients, and ends when the last one is sent.
    """
    ended = sorted(record.requests, key=lambda row: row.finish_ns)
    start_ns = ended[run.clients - 1].finish_ns
    end_ns = max(row.arrival_ns for row in ended)
    rows = [row for row in ended if start_ns < row.finish_ns <= end_ns]
    seconds = max(end_ns - start_ns, 1) / 1e9
    good = [row for row in rows if meets_sla(row, run.served)]
    ttft_s = percentile([row.ttft_s for row in rows], PERCENT)
    gap_s = percentile([row.largest_gap_ns / 1e9 for row in rows], PERCENT)
    return {
        "goodput_tokens_per_s": _tokens(good) / seconds,
        "throughput_tokens_per_s": _tokens(rows) / seconds,
        "within_sla": len(good) / max(1, len(rows)),
        "ttft_p99_s": ttft_s,
        "mtpot_p99_s": gap_s,
        "sla_met": ttft_s < run.served.ttft_s and gap_s < run.served.gap_s,
        "preemptions_per_request": sum(row.preemptions for row in rows) / max(1, len(rows)),
    }


def meets_sla(row: RequestRow, served: ServedModel) -> bool:
    """Whether the TTFT and the largest inter-token latency (MTPOT) are within the SLA."""
    return row.ttft_s < served.ttft_s and row.largest_gap_ns / 1e9 < served.gap_s


def _tokens(rows: Sequence[RequestRow]) -> int:
    return sum(row.output_tokens for row in rows)
