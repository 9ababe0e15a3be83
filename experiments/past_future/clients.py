"""Past-Future's closed loop: clients that wait for their answers, one model on A100-80s, an SLA."""

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
class Deployment:
    """A model on A100-80s with NVLink."""

    model: str
    """Its name."""
    tp: int
    """Devices that share it."""
    ttft_s: float
    """Longest time to the first token that its SLA allows."""
    gap_s: float
    """Longest time between two tokens that its SLA allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """One run of a closed loop."""

    deployment: Deployment
    """What serves them."""
    lengths: str
    """Name of a distribution."""
    longest: int
    """Output tokens at which answers end."""
    admission: Admission
    """The system's."""
    clients: int
    """Users."""
    requests: int
    """Of all of them together."""
    victim: str = "newest"
    """The policy's name."""
    batched_tokens: int = BATCHED_TOKENS
    """Most tokens that a step computes."""


def requests_that_fit(deployment: Deployment, lengths: str, longest: int) -> float:
    """How many requests fill the memory at a random moment of a long run, if none waits.

    A long output is met more often than a short one, in proportion to its length.
    """
    prompts, outputs = LENGTHS[lengths].sample(_SAMPLE, 0)
    outputs = np.minimum(outputs, longest)
    held = (outputs * (prompts + outputs / 2)).sum() / outputs.sum()
    return _kv_tokens(deployment) / float(held)


def _kv_tokens(deployment: Deployment) -> int:
    return kv_tokens(MODEL_SPECS[deployment.model], DEVICE_SPECS["a100-80"], deployment.tp, MEMORY_SHARE)


def run_clients(run: Clients) -> dict[str, Value]:
    """Simulate one run; what it came to between its beginning and its end, in which fewer clients ask."""
    deployment = run.deployment
    model, device = MODEL_SPECS[deployment.model], DEVICE_SPECS["a100-80"]
    engine = EngineSpec(
        services={model.name: ServiceSpec(times=RooflineTimes(model, device, deployment.tp))},
        layout=token_layout(_kv_tokens(deployment) // BLOCK_TOKENS, BLOCK_TOKENS, model.name),
        scheduler=replace(options_of(run.admission, run.victim), max_batched_tokens=run.batched_tokens),
        prefix_caching=False,
    )
    requests = synthetic_requests(run.lengths, run.requests, 0, run.longest, model.name)
    watch = Watch(sample_s=60.0)
    return figures(Simulation([engine], ClosedLoop(requests, run.clients), watch=watch).run(), run)


def figures(record: RunRecord, run: Clients) -> dict[str, Value]:
    """Goodput and what it is made of, per second of the time in which all clients are at work.

    That begins when as many requests have ended as there are clients, and lasts until the last one is sent.
    """
    ended = sorted(record.requests, key=lambda row: row.finish_ns)
    start_ns = ended[run.clients - 1].finish_ns
    end_ns = max(row.arrival_ns for row in ended)
    rows = [row for row in ended if start_ns < row.finish_ns <= end_ns]
    seconds = max(end_ns - start_ns, 1) / 1e9
    good = [row for row in rows if within(row, run.deployment)]
    ttft_s = percentile([row.ttft_s for row in rows], PERCENT)
    gap_s = percentile([row.largest_gap_ns / 1e9 for row in rows], PERCENT)
    return {
        "goodput_tokens_per_s": _tokens(good) / seconds,
        "throughput_tokens_per_s": _tokens(rows) / seconds,
        "within_sla": len(good) / max(1, len(rows)),
        "ttft_p99_s": ttft_s,
        "mtpot_p99_s": gap_s,
        "sla_met": ttft_s < run.deployment.ttft_s and gap_s < run.deployment.gap_s,
        "preemptions_per_request": sum(row.preemptions for row in rows) / max(1, len(rows)),
    }


def within(row: RequestRow, deployment: Deployment) -> bool:
    """Whether a request counts: its first token and its largest gap (MTPOT) are within the SLA."""
    return row.ttft_s < deployment.ttft_s and row.largest_gap_ns / 1e9 < deployment.gap_s


def _tokens(rows: Sequence[RequestRow]) -> int:
    return sum(row.output_tokens for row in rows)
