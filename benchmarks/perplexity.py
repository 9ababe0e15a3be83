"""Perplexity of one model in several precisions, computed by the engine itself.

    python -m benchmarks.perplexity                            # smollm2 in float32, bfloat16 and int8
    python -m benchmarks.perplexity --model gemma3-270m --text book.txt --tokens 40000
    python -m benchmarks.perplexity --dtypes bfloat16 --kv-cache-dtypes auto int8

The text (by default Python's language reference, as in `help()`) is cut into windows, each of which is served
as a prompt. Log-probabilities of prompt tokens are taken from the engine's own forward passes, with its usual
chunks and batches. Each dtype of weights is run with each dtype of KV, and compared with the first pair.
"""

import argparse
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.interrupts import print_at_end
from shoal import SamplingParams, Service
from shoal.core import Request
from shoal.engine import EngineOptions, assemble_engine
from shoal.execute.attention.transformers_hook import AttentionStep
from shoal.execute.model.model_set import load_models
from shoal.execute.model.transformers_forward import Forward
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer, resolve_model

SERVICE = "model"


class Scored:
    """A model that sums the negative log-likelihood of the prompt tokens that it computes."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.nats = 0.0
        self.tokens = 0

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """See Forward."""
        everything = torch.arange(input_ids.shape[1])
        logits = self._forward(input_ids, positions, everything, step)
        ids, positions = input_ids[0], positions[0]
        followed = (positions[1:] == positions[:-1] + 1).nonzero().ravel()
        for part in torch.split(followed, 64):
            nats = torch.nn.functional.cross_entropy(logits[part].float(), ids[part + 1], reduction="sum")
            self.nats += float(nats)
        self.tokens += len(followed)
        return logits[rows]

    def hidden(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """See Forward."""
        return self._forward.hidden(input_ids, positions, rows, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Forward."""
        return self._forward.logits(hidden)


def default_text() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def perplexity(folder: Path, dtype: str, kv_dtype: str, windows: list[list[int]]) -> float:
    services = (Service(name=SERVICE, model=str(folder), dtype=dtype),)
    models = load_models(services, {SERVICE: folder})
    served = models.services[SERVICE]
    scored = Scored(served.model.forward)
    models.services[SERVICE] = replace(served, model=replace(served.model, forward=scored))
    options = EngineOptions(
        services=services,
        kv_cache=KVCacheOptions(memory_bytes=1 << 30, dtype=kv_dtype, prefix_caching=False),
    )
    engine = assemble_engine(options, models, threads=torch.get_num_threads())[0]
    for number, window in enumerate(windows):
        engine.submit(
            Request(
                id=str(number),
                service=SERVICE,
                prompt=tuple(window),
                sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
                arrival_ns=engine.now_ns(),
            )
        )
        while engine.busy:
            engine.step()
    engine.close()
    assert scored.tokens == sum(len(window) - 1 for window in windows)
    return math.exp(scored.nats / scored.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "int8"])
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["auto"])
    parser.add_argument("--text", type=Path, help="a file; default: Python's language reference")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--window", type=int, default=512, help="tokens of a prompt")
    args = parser.parse_args()
    folder = resolve_model(args.model)
    text = args.text.read_text() if args.text else default_text()
    tokenizer = Tokenizer.from_folder(folder)
    begin = tokenizer.encode("")  # a begin token, if the model was trained with one
    tokens = tokenizer.encode(text, add_special_tokens=False)[: args.tokens]
    starts = range(0, len(tokens) - args.window + 1, args.window)
    windows = [begin + tokens[at : at + args.window] for at in starts]
    table = Table("dtype", "KV", "perplexity", f"against {args.dtypes[0]}, {args.kv_cache_dtypes[0]}")
    first = None
    Console().print(f"{args.model}, {len(windows) * args.window:,} tokens in windows of {args.window}")
    with print_at_end(table):
        for dtype, kv_dtype in product(args.dtypes, args.kv_cache_dtypes):
            found = perplexity(folder, dtype, kv_dtype, windows)
            first = first or found
            table.add_row(dtype, kv_dtype, f"{found:.4f}", f"{found / first - 1:+.2%}")


if __name__ == "__main__":
    main()
