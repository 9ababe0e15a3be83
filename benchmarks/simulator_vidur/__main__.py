"""Simulated requests per second of wall time: Shoal's simulator compared with Vidur.

    python -m venv /tmp/vidur-venv && /tmp/vidur-venv/bin/pip install vidur==0.0.26
    python -m benchmarks.simulator_vidur --vidur-python /tmp/vidur-venv/bin/python

Runs the first two cases of `benchmarks/simulator_speed.py` with the same requests, KV blocks, limits,
dispatch and step times. Vidur runs its `sarathi` scheduler, whose chunked prefill is closest to ours, with
step times from tables that are filled with our roofline of Llama 3.1 8B on an A100; its own profiles are not
in its package. It rounds contexts and tokens up, so its steps are a little longer and fewer. Of Vidur only
the event loop is timed, without metrics, plots and traces; of ours everything from building the engines to
the records. Runs alternate; rates are of median times.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulator_speed import BLOCK_SIZE, CONTEXT, TRACE, Case, cases, make_requests, simulate
from shoal.core import Request
from shoal.forecast import RooflineTimes, StepRows, device_spec, kv_tokens, model_spec

RUNNER = Path(__file__).with_name("runner.py")
GRANULARITY = 256  # Vidur rounds contexts up to a multiple of this by default.
CHUNK_GRANULARITY = 32  # And chunks to a multiple of this.
INSTALL = "python -m venv /tmp/vidur-venv && /tmp/vidur-venv/bin/pip install vidur==0.0.26"

COLUMNS = (
    "",
    "requests",
    "steps",
    "TTFT s",
    "ours",
    "every step",
    "Vidur",
    "ours / Vidur",
    "every step / Vidur",
)


@dataclass
class Runs:
    """Repeated runs of one simulator: seconds of each; steps and mean TTFT, which do not vary."""

    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    ttft_s: float = 0.0

    def add(self, seconds: float, steps: int, ttft_s: float) -> None:
        self.seconds.append(seconds)
        self.steps, self.ttft_s = steps, ttft_s

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def step_tables(case: Case) -> dict[str, list[tuple[float, ...]]]:
    """Milliseconds per layer by tokens, by (decodes, mean context) and by (context, chunk).

    Vidur adds the three up: what depends on tokens alone, and what decodes and chunks take above that.
    """
    model = model_spec("llama-3.1-8b")
    times = RooflineTimes(model, device_spec("a100-80"))
    tokens, running = case.scheduler.max_batched_tokens, case.scheduler.max_running

    assert running is not None, "the compared case has a limit"

    def ms(rows: StepRows) -> float:
        return times.step_time(rows) * 1e3 / model.layers

    base = [0.0] + [ms(StepRows(count, 0)) for count in range(1, tokens + 1)]
    contexts = range(0, CONTEXT + 1, GRANULARITY)
    chunks = range(CHUNK_GRANULARITY, tokens + 1, CHUNK_GRANULARITY)
    return {
        "tokens_ms": [(count, base[count]) for count in range(1, tokens + 1)],
        "decode_ms": [
            (batch, context, ms(StepRows(batch, batch * context, sampled=batch)) - base[batch])
            for batch in range(1, running + 1)
            for context in contexts
        ],
        "prefill_ms": [
            (context, chunk, ms(StepRows(0, 0, ((chunk, max(0, context - chunk)),), 1)) - base[chunk])
            for context in contexts
            for chunk in chunks
        ],
    }


def vidur_job(case: Case, requests: Sequence[Request]) -> dict[str, Any]:
    """Input of the runner."""
    model, device = model_spec("llama-3.1-8b"), device_spec("a100-80")
    return {
        "requests": [
            (request.arrival_ns / 1e9, len(request.prompt), request.true_output_tokens)
            for request in requests
        ],
        "replicas": case.replicas,
        "blocks": kv_tokens(model, device) // BLOCK_SIZE,
        "block_size": BLOCK_SIZE,
        "context": CONTEXT,
        "granularity": GRANULARITY,
        "max_running": case.scheduler.max_running,
        "max_batched_tokens": case.scheduler.max_batched_tokens,
        **step_tables(case),
    }


def run_vidur(python: str, job: str, requests: int) -> dict[str, float]:
    """One run in its own process; exits if it fails."""
    done = subprocess.run([python, str(RUNNER)], input=job, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"Vidur failed:\n{(done.stderr or done.stdout)[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if result["finished"] != requests:
        raise SystemExit(f"Vidur finished {result['finished']} of {requests} requests")
    return result


def require_vidur(python: str | None) -> str:
    """The interpreter; exits with instructions if it has no Vidur."""
    if python is None:
        raise SystemExit(f"--vidur-python is needed: an interpreter that has Vidur, as made by\n  {INSTALL}")
    try:
        probe = subprocess.run([python, "-c", "import vidur"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"{python} cannot be run ({error.strerror}); make it with\n  {INSTALL}") from None
    if probe.returncode != 0:
        raise SystemExit(f"{python} has no Vidur; make one that has with\n  {INSTALL}\n{probe.stderr[-500:]}")
    return python


def compare(case: Case, requests: Sequence[Request], python: str, repeat: int) -> list[Runs]:
    """Alternating runs of ours with skip-ahead, of ours with every step, and of Vidur."""
    ours_fast, ours_slow, vidur = runs = [Runs(), Runs(), Runs()]
    job = json.dumps(vidur_job(case, requests))
    for round_number in range(repeat):
        for ours, skip in ((ours_fast, True), (ours_slow, False)):
            record, seconds = simulate(case, requests, skip_ahead=skip)
            ttft = statistics.fmean(row.ttft_s for row in record.requests)
            ours.add(seconds, sum(engine.steps for engine in record.engines), ttft)
        result = run_vidur(python, job, len(requests))
        vidur.add(result["seconds"], int(result["steps"]), result["ttft_s"])
        seen = ", ".join(f"{run.seconds[-1]:.2f}" for run in runs)
        print(f"{case.name}, round {round_number + 1}: {seen} s", file=sys.stderr)
    return runs


def ratio(ours: Runs, vidur: Runs) -> str:
    """Speedup of ours: of the medians, and in brackets the extremes of single rounds."""
    rounds = [theirs / mine for mine, theirs in zip(ours.seconds, vidur.seconds, strict=True)]
    return f"{vidur.median_s / ours.median_s:.1f} ({min(rounds):.1f}-{max(rounds):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vidur-python", help="interpreter of an environment that has Vidur")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--repeat", type=int, default=5, help="rounds on one replica")
    parser.add_argument("--repeat-long", type=int, default=1, help="rounds on 16 replicas; 0 leaves them out")
    arguments = parser.parse_args()
    python = require_vidur(arguments.vidur_python)
    table = Table(title="requests simulated per second; steps and TTFT as ours / Vidur's")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for case, repeat in zip(cases(), (arguments.repeat, arguments.repeat_long), strict=False):
        if repeat < 1:
            continue
        requests = make_requests(case.requests, case.replicas, arguments.trace)
        fast, slow, vidur = compare(case, requests, python, repeat)
        table.add_row(
            case.name,
            f"{len(requests):,}",
            f"{fast.steps:,} / {vidur.steps:,}",
            f"{fast.ttft_s:.3f} / {vidur.ttft_s:.3f}",
            *(f"{len(requests) / runs.median_s:,.0f}" for runs in (fast, slow, vidur)),
            *(ratio(runs, vidur) for runs in (fast, slow)),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
