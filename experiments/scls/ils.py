"""Iteration-level scheduling (ILS), SCLS's baseline: continuous batching on eight engines (section 5.1)."""

from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from experiments.result import Value
from experiments.scls.setup import AVAILABLE_BYTES, ENGINES, SECONDS, TOKEN_BYTES, WORKERS, ZETA
from experiments.scls.workload import MAX_OUTPUT, MAX_PROMPT, SERVICE, codefuse_requests
from shoal.cluster.manager.dispatch import RoundRobin
from shoal.core import percentile
from shoal.forecast import StepRows
from shoal.measure import RunRecord
from shoal.schedule import Conservative, Fcfs, SchedulerOptions
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, token_layout

FEW = 3
"""Running requests with which continuous batching is as slow as in the paper."""

BLOCK_TOKENS = 16
STEP_TOKENS = 768
ILS_ASSUMPTIONS = (
    "ILS: continuous batching on the ds engine's coefficients without padding, prompts in chunks, at most "
    "768 tokens a step, first come first served, round-robin over 8 engines; a request is admitted when "
    "its prompt and 1024 output tokens fit together with those of all running requests, in the KV memory of "
    "hf.",
    f"ILS-{FEW}: the same with at most {FEW} requests at once on an engine, chosen to match the paper's "
    "margins.",
)


@dataclass(frozen=True, slots=True)
class RaggedTimes:
    """Step times of the ``ds`` engine without padding, decodes and prompts in one step."""

    constant_s: float
    token_s: float
    """Per prompt token."""
    context_s: float
    """Per position attended by decodes."""

    def step_time(self, rows: StepRows) -> float:
        prompt_tokens = sum(new for new, _ in rows.chunks)
        return self.constant_s + self.context_s * rows.decode_context + self.token_s * prompt_tokens

    def decode_times(self, sequences: int, context: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of ``steps`` decode steps in a row."""
        contexts = np.arange(context, context + sequences * steps, sequences, dtype=np.int64)
        # Adding nothing for prompts, as ``step_time`` does, keeps the two equal to the last bit.
        return np.asarray(self.constant_s + self.context_s * contexts + 0.0, dtype=np.float64)


def run_ils(
    *,
    rate: float,
    seconds: float = SECONDS,
    workers: int = WORKERS,
    max_running: int | None = None,
    seed: int = 0,
) -> RunRecord:
    """Simulate continuous batching.

    max_running: requests per engine; None: as many as fit. A request is admitted when its prompt and the
    longest output fit together with those of all running requests.
    """
    speed = ENGINES["ds"].time
    times = RaggedTimes(speed.decode.constant, speed.prefill.product, speed.decode.product)
    spec = EngineSpec(
        services={SERVICE: ServiceSpec(times=times, context_tokens=MAX_PROMPT + MAX_OUTPUT)},
        layout=token_layout(
            int(ZETA * AVAILABLE_BYTES) // TOKEN_BYTES // BLOCK_TOKENS, BLOCK_TOKENS, SERVICE
        ),
        scheduler=SchedulerOptions(
            order=Fcfs(),
            admission=Conservative(),
            victim="newest",
            preemption_mode="recompute",
            preempt_for_waiting="never",
            max_token_gap_s=1e9,
            max_running=256 if max_running is None else max_running,
            max_batched_tokens=STEP_TOKENS,
        ),
        prefix_caching=False,
    )
    requests = codefuse_requests(rate, seconds, seed)
    return Simulation([spec] * workers, OpenLoop(requests), dispatch=RoundRobin()).run()


def ils_figures(record: RunRecord) -> dict[str, Value]:
    """Those of ``scls.setup.figures`` that continuous batching has."""
    times = [row.e2e_s for row in record.requests]
    return {
        "throughput": len(times) / (record.end_ns / 1e9),
        "mean_response_s": fmean(times),
        "p95_response_s": percentile(times, 95),
        "invalid_tokens": 0.0,
        "pad_tokens": 0.0,
    }


def ils_completion_std_s(record: RunRecord) -> float:
    """Standard deviation of the times at which engines finish their last request."""
    last = dict.fromkeys(range(len(record.engines)), 0)
    for row in record.requests:
        last[row.engine] = max(last[row.engine], row.finish_ns)
    return pstdev(end_ns / 1e9 for end_ns in last.values())
