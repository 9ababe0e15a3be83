"""Memory and step times of one request with a long prompt.

    python -m benchmarks.long_context                      # 8,000 and 30,000 tokens, bfloat16, all cores
    python -m benchmarks.long_context --tokens 8000 --dtype int8 --chunk 512

The model is random, with the shapes of SmolLM2-135M. The KV pool is written once before, so the process grows
only by the memory of steps. Prints for each prompt length: TTFT; growth of the process's largest resident
size since the model was loaded; the median decode step; its increase per thousand tokens of context relative
to a prompt of 128 tokens; and that as GB/s of KV, with the speed at which all threads read a large tensor.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from shoal.core import Request, SamplingParams, Service
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine, default_threads
from shoal.execute.model.model_set import load_models
from shoal.execute.protocol import Executor
from shoal.execute.torch_executor import TorchExecutor
from shoal.kvcache import KVCacheOptions
from shoal.schedule import SchedulerOptions

SERVICE = "bench"
SHORT = 128
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
CONFIG = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=LAYERS,
    num_attention_heads=9,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=1 << 17,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Run:
    """Figures of one request."""

    prompt_tokens: int
    first_token_s: float
    decode_s: float
    """Median step after the first token."""
    peak_bytes: int
    """Largest resident size of the process so far."""


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def measure(engine: Engine, prompt_tokens: int, output_tokens: int) -> Run:
    prompt = torch.randint(0, CONFIG.vocab_size, (prompt_tokens,)).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    started = time.perf_counter()
    engine.submit(
        Request(
            id=str(prompt_tokens), service=SERVICE, prompt=prompt, sampling=sampling,
            arrival_ns=time.monotonic_ns(),
        )
    )  # fmt: skip
    times = []
    while engine.busy:
        if engine.step():
            times.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(times)]
    return Run(prompt_tokens, times[0] - started, median(steps), peak_bytes())


def read_bytes_per_s() -> float:
    """Memory read speed of all threads."""
    numbers = torch.ones(1 << 28, dtype=torch.int32)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        numbers.sum(dtype=torch.int32)
        best = min(best, time.perf_counter() - started)
    return numbers.nbytes / best


def build_engine(args: argparse.Namespace, folder: Path) -> Engine:
    """An engine with a random model, and a resident KV pool for the longest prompt."""
    service = Service(name=SERVICE, model="random", dtype=args.dtype)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    models = load_models([service], {SERVICE: folder}, threads=args.threads)
    token_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    options = EngineOptions(
        services=(service,),
        kv_cache=KVCacheOptions(memory_bytes=(max(args.tokens) + 4096) * token_bytes),
        scheduler=SchedulerOptions(max_batched_tokens=args.chunk),
    )
    return assemble_engine(options, models, threads=args.threads, wrap=touch_pool)[0]


def touch_pool(executor: Executor) -> Executor:
    """Make the whole pool resident."""
    assert isinstance(executor, TorchExecutor)
    executor.store.buffer.zero_()
    return executor


def show(runs: Sequence[Run], before_bytes: int, args: argparse.Namespace) -> None:
    token_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    table = Table(title=f"{args.dtype}, chunks of {args.chunk}, threads: {args.threads}")
    for column in (
        "prompt",
        "first token, s",
        "memory, MiB",
        "decode step, ms",
        "ms per 1,000 tokens",
        "GB/s",
    ):
        table.add_column(column, justify="right")
    for run in runs:
        slope = (run.decode_s - runs[0].decode_s) / max(run.prompt_tokens - runs[0].prompt_tokens, 1)
        table.add_row(
            f"{run.prompt_tokens:,}",
            f"{run.first_token_s:.2f}",
            f"{(run.peak_bytes - before_bytes) / (1 << 20):.0f}",
            f"{run.decode_s * 1e3:.1f}",
            f"{slope * 1e6:.2f}" if slope else "",
            f"{token_bytes / slope / 1e9:.1f}" if slope else "",
        )
    Console().print(table, f"memory is read at {read_bytes_per_s() / 1e9:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8_000, 30_000], help="of the prompts")
    parser.add_argument("--output", type=int, default=33, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of the prompt in one step")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=default_threads())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = build_engine(args, Path(folder))
    before = peak_bytes()
    runs = [measure(engine, tokens, args.output) for tokens in (SHORT, *sorted(args.tokens))]
    show(runs, before, args)
    engine.close()


if __name__ == "__main__":
    main()
