"""``shoal bench`` beside ``vllm bench serve`` on one server: the figures that both report, in turns.

    python -m benchmarks.bench_beside_vllm --vllm ENV/bin/vllm    # of an environment with vLLM for CPUs
    python -m benchmarks.bench_beside_vllm --vllm ENV/bin/vllm --rounds 5 --rate 2 --requests 40

Both send completions of equal lengths at equal times to a server with SmolLM2. Prints the middle of each
figure over all rounds with its least and largest value, for both, and their ratio.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.page_cost import serving

FIGURES = (
    "completed",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "p99_itl_ms",
)
MODEL = "smollm2"


def write_trace(path: Path, options: argparse.Namespace) -> None:
    """A trace with equal requests at equal intervals."""
    begin = datetime(2024, 1, 1, tzinfo=UTC)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for number in range(options.requests):
            at = begin + timedelta(seconds=number / options.rate)
            rows.writerow((at.strftime("%Y-%m-%d %H:%M:%S.%f"), options.prompt_tokens, options.output_tokens))


def by_shoal(url: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    trace, result = folder / "trace.csv", folder / "shoal.json"
    write_trace(trace, options)
    command = [
        sys.executable,
        "-m",
        "shoal.cli",
        "bench",
        url,
        "--trace",
        str(trace),
        "--vllm-json",
        str(result),
    ]
    subprocess.run([*command, "--model", MODEL], check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(result.read_text()))


def by_vllm(url: str, folder: Path, tokenizer: str, options: argparse.Namespace) -> dict[str, float]:
    command = [options.vllm, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"]
    command += ["--base-url", url, "--model", MODEL, "--tokenizer", tokenizer, "--ignore-eos"]
    command += ["--dataset-name", "random", "--random-input-len", str(options.prompt_tokens)]
    command += ["--random-output-len", str(options.output_tokens), "--num-prompts", str(options.requests)]
    # Nearly equal intervals between requests.
    command += ["--request-rate", str(options.rate), "--burstiness", "1000"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return dict(json.loads((folder / "vllm.json").read_text()))


def show(rounds: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'':22} {'shoal bench':>28} {'vllm bench serve':>28}  ratio")
    for figure in FIGURES:
        middles, cells = [], []
        for results in rounds.values():
            values = [float(result[figure]) for result in results]
            middles.append(statistics.median(values))
            cells.append(f"{middles[-1]:.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"{figure:22} {cells[0]:>28} {cells[1]:>28}  {middles[0] / middles[1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", required=True, help="the vllm command of its own environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    options = parser.parse_args()
    pull = [sys.executable, "-m", "shoal.cli", "models", "pull", MODEL]
    pulled = subprocess.run(pull, capture_output=True, text=True, check=True)
    tokenizer = pulled.stdout.rpartition(" is at ")[2].strip()
    rounds: dict[str, list[dict[str, float]]] = {"shoal": [], "vllm": []}
    with serving(MODEL) as (url, _), tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            rounds["shoal"].append(by_shoal(url, Path(folder), options))
            rounds["vllm"].append(by_vllm(url, Path(folder), tokenizer, options))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    show(rounds)


if __name__ == "__main__":
    main()
