"""How near the simulator comes to somebody else's engine: vLLM 0.19 on an RTX 4090.

    python benchmarks/fidelity_vllm.py [--calibration ../shared/calibration/vllm_rtx4090_llama31_8b]

Simulates the 300 requests that were measured there with Shoal's scheduler (first come first served, 2,588
blocks of 16 tokens, 2,048 tokens a step) and step times from the profile of that GPU, and prints mean and
99th percentile of TTFT, TPOT and E2E beside those measured.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from shoal.core import Request, RequestRecord, SamplingParams, SyntheticPrompt, percentile
from shoal.forecast import ProfileTimes
from shoal.schedule import Aggressive, Fcfs, SchedulerOptions
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, token_layout

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parent.parent / "shared" / "calibration" / "vllm_rtx4090_llama31_8b"
BLOCKS, BLOCK_SIZE, BATCHED_TOKENS, SEQUENCES, CONTEXT = 2_588, 16, 2_048, 256, 32_768
METRICS = ("ttft_s", "tpot_s", "e2e_s")


def read_measured(path: Path) -> list[RequestRecord]:
    """Timings of the engine; a request arrives when it is queued there."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    begin = min(row["queued_ts"] for row in rows)
    return [
        RequestRecord(
            request_id=row["request_id"],
            service="default",
            arrival_ns=round((row["queued_ts"] - begin) * 1e9),
            first_token_ns=round((row["first_token_ts"] - begin) * 1e9),
            finish_ns=round((row["last_token_ts"] - begin) * 1e9),
            prompt_tokens=row["input_toks"],
            output_tokens=row["output_toks"],
        )
        for row in rows
    ]


def simulate(measured: Sequence[RequestRecord], profile: Path) -> Sequence[RequestRecord]:
    """The same requests in simulation."""
    spec = EngineSpec(
        services={"default": ServiceSpec(times=ProfileTimes.load(profile), context_tokens=CONTEXT)},
        layout=token_layout(BLOCKS, BLOCK_SIZE),
        scheduler=SchedulerOptions(
            order=Fcfs(),
            admission=Aggressive(watermark=1.0),
            victim="newest",
            preemption_mode="recompute",
            preempt_for_waiting="never",
            starvation_s=1e6,
            max_running=SEQUENCES,
            max_batched_tokens=BATCHED_TOKENS,
        ),
    )
    requests = [
        Request(
            id=one.request_id,
            service="default",
            prompt=SyntheticPrompt(one.prompt_tokens),
            sampling=SamplingParams(max_tokens=one.output_tokens),
            arrival_ns=one.arrival_ns,
            true_output_tokens=one.output_tokens,
        )
        for one in measured
    ]
    record = Simulation([spec], OpenLoop(requests)).run()
    print(f"{record.engines[0].evictions} preemptions in simulation")
    return record.requests


def figures(records: Sequence[RequestRecord]) -> Mapping[tuple[str, str], float]:
    """Mean and 99th percentile of every metric, in seconds."""
    found = {}
    for metric in METRICS:
        values = [getattr(record, metric) for record in records]
        found[metric, "mean"] = fmean(values)
        found[metric, "p99"] = percentile(values, 99)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, default=DEFAULT)
    folder = parser.parse_args().calibration
    if not folder.exists():
        raise SystemExit(
            f"there is no {folder}; point --calibration at the folder with measured/ and profile/"
        )
    measured = read_measured(folder / "measured" / "requests.jsonl")
    simulated = figures(simulate(measured, folder / "profile"))
    table = Table("metric", "", "measured s", "simulated s", "difference")
    for (metric, kind), value in figures(measured).items():
        other = simulated[metric, kind]
        table.add_row(metric, kind, f"{value:.4f}", f"{other:.4f}", f"{other / value - 1:+.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
