"""Time of sampling a step's rows with several settings, by torch and by native kernels.

    python -m benchmarks.sampling [--rows 64] [--model smollm2] [--threads 1] [--step 60]

The logits are those of a model at --rows places of a text (this project's README). Settings and samplers take
turns; a cell has the median of the rounds, and the fastest, in milliseconds. With one thread, CPU time is
measured, which other processes affect less; with more, elapsed time. With --step, the milliseconds of a whole
step (see step_profile.py), it also prints the additional cost over greedy sampling as a share of the step.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.core import SamplingParams
from shoal.execute.sampling.native_sampler import NativeSampler
from shoal.execute.sampling.sampler import sample
from shoal.execute.sequences import RunningSequence
from shoal.models import resolve_model
from shoal.native import load_native, native_status

README = Path(__file__).resolve().parent.parent / "README.md"
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "temperature 0.7, top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "top-k 50": SamplingParams(top_k=50),
    "top-k 50, top-p 0.95": SamplingParams(top_k=50, top_p=0.95),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "greedy, 5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2),
}


def read_logits(model: str, rows: int) -> tuple[torch.Tensor, list[int]]:
    """Logits [rows, vocab] in bfloat16, and the tokens of the text."""
    folder = resolve_model(model)
    tokens = AutoTokenizer.from_pretrained(folder)(README.read_text(encoding="utf-8")).input_ids
    if len(tokens) < 2 * rows:
        raise SystemExit(f"the text has {len(tokens)} tokens, too few for {rows} rows")
    tokens = tokens[: max(512, 2 * rows)]
    places = torch.linspace(rows // 2, len(tokens) - 1, rows).long()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        return network(torch.tensor([tokens])).logits[0, places].contiguous(), tokens


def measure(
    logits: torch.Tensor, tokens: list[int], rounds: int, threads: int
) -> dict[str, list[list[float]]]:
    """Times of each sampler in milliseconds, by settings."""
    library = load_native()
    samplers = [None] if library is None else [None, NativeSampler(library)]
    clock = time.thread_time if threads == 1 else time.perf_counter
    groups = {
        (kind, sampler): [
            RunningSequence([*tokens[:200], row], 200, row, params, seed=row) for row in range(len(logits))
        ]
        for kind, params in KINDS.items()
        for sampler in range(len(samplers))
    }
    times: dict[str, list[list[float]]] = {kind: [[] for _ in samplers] for kind in KINDS}
    for number in range(rounds + 1):
        for (kind, sampler), rows in groups.items():
            fresh = logits.clone()
            started = clock()
            sample(fresh, rows, [0], samplers[sampler])
            if number:  # the first only warms up
                times[kind][sampler].append((clock() - started) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--step", type=float, help="milliseconds of a whole greedy step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logits, tokens = read_logits(args.model, args.rows)
    times = measure(logits, tokens, args.rounds, args.threads)
    greedy_ms = median(times["greedy"][-1])
    table = Table(title=f"{args.rows} rows of {args.model}, {args.threads} threads; {native_status()}")
    table.add_column("sampling")
    for sampler in ("torch, ms", "native, ms")[: len(times["greedy"])]:
        table.add_column(sampler, justify="right")
    if args.step:
        table.add_column("of a step", justify="right")
    for kind, samplers in times.items():
        cells = [f"{median(each):.2f} ({min(each):.2f})" for each in samplers]
        more = [f"{(median(samplers[-1]) - greedy_ms) / args.step:+.1%}"] if args.step else []
        table.add_row(kind, *cells, *more)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
