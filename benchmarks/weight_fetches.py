"""Fetches and evictions of weights: how long they take, what steps pay for them, and what stays behind.

    python -m benchmarks.weight_fetches                        # two models like SmolLM2, in int8
    python -m benchmarks.weight_fetches --dtype bfloat16 --moves 100

The models have SmolLM2's shape and random weights, so nothing is downloaded; their images are made first, in
a temporary folder. Then these are in the page cache. Prints

- milliseconds of a fetch by the executor while nothing else runs, and of ``preadv`` of the same file into
  equally fresh memory by the calling thread, in turns;
- milliseconds of a fetch while the other model decodes, and of a decode with and without a fetch;
- for many evictions and fetches in random order whether outputs stayed the same, and the process's memory.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.interrupts import print_at_end
from shoal.core import Arrival, NewSequence, SamplingParams, Service, StepPlan, StepResult
from shoal.execute.model.model_set import ModelSet, load_models
from shoal.execute.torch_executor import TorchExecutor
from shoal.execute.weights.image import Place, WeightImage, read_weights
from shoal.execute.weights.memory import WeightMemory
from shoal.kvcache import BlockPool, plan_layout

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""The shape of SmolLM2-135M."""
PROMPT = 64
MAX_TOKENS = 512
ROWS = 8
DECODES = 10
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Bench:
    """Two models whose weights come and go, and plans for them made by hand."""

    def __init__(self, dtype: str, threads: int | None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.models = _load(Path(self._folder.name), dtype, threads)
        layout = plan_layout(self.models.kv_shapes, memory_bytes=256 << 20, block_size=16)
        self._pool = BlockPool(layout)
        self._executor = TorchExecutor(self.models, layout)
        self._sequence = 0

    @property
    def services(self) -> Sequence[str]:
        return list(self.models.services)

    def image(self, service: str) -> WeightImage:
        image = self.models.services[service].model.image
        assert image is not None
        return image

    def run(self, plan: StepPlan) -> StepResult:
        self._executor.submit(plan)
        return self._executor.collect()

    def evict(self, service: str) -> None:
        self.run(_moves(service, evict=(self.models.services[service].weights,)))

    def start_fetch(self, service: str) -> None:
        self.run(_moves(service, fetch=(self.models.services[service].weights,)))

    def arrival(self) -> Arrival | None:
        arrived = self._executor.arrivals()
        assert all(each.error is None for each in arrived), arrived
        return arrived[0] if arrived else None

    def fetch(self, service: str) -> float:
        """Fetch weights while nothing else runs; returns the seconds that it took."""
        self.start_fetch(service)
        while (arrival := self.arrival()) is None:
            time.sleep(0.0005)
        return arrival.seconds

    def generate(self, service: str, tokens: int) -> list[list[int]]:
        """Tokens of a few prompts, in one batch."""
        decodes = Decodes(self, service)
        outputs = [decodes.step() for _ in range(tokens)]
        decodes.end()
        return outputs

    def allocate(self, service: str) -> list[int]:
        blocks = self._pool.allocate(service, -(-MAX_TOKENS // 16))
        assert blocks is not None
        return blocks

    def free(self, service: str, blocks: Sequence[int]) -> None:
        self._pool.free(service, blocks)

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def close(self) -> None:
        self._executor.close()
        self._folder.cleanup()


class Decodes:
    """A batch of ``ROWS`` requests of one service, whose prompts are computed."""

    def __init__(self, bench: Bench, service: str) -> None:
        self._bench = bench
        self._service = service
        self._numbers = [bench.next_sequence() for _ in range(ROWS)]
        self._blocks = [bench.allocate(service) for _ in range(ROWS)]
        joined = tuple(
            NewSequence(number, _prompt(row), PROMPT, 0, tuple(blocks), GREEDY, 0)
            for row, (number, blocks) in enumerate(zip(self._numbers, self._blocks, strict=True))
        )
        bench.run(self._plan(PROMPT, joined))

    def step(self) -> list[int]:
        return list(self._bench.run(self._plan(1)).tokens[0])

    def end(self) -> None:
        left = tuple(self._numbers)
        self._bench.run(
            StepPlan(number=0, service=self._service, seq_ids=(), new_tokens=(), sampled=(), left=left)
        )
        for blocks in self._blocks:
            self._bench.free(self._service, blocks)

    def _plan(self, new_tokens: int, joined: tuple[NewSequence, ...] = ()) -> StepPlan:
        return StepPlan(
            number=0,
            service=self._service,
            seq_ids=tuple(self._numbers),
            new_tokens=(new_tokens,) * ROWS,
            sampled=tuple(range(ROWS)),
            joined=joined,
        )


def _prompt(row: int) -> list[int]:
    return [(31 * row + 7 * place) % 40_000 + 10 for place in range(PROMPT)]


def _moves(service: str, *, evict: tuple[str, ...] = (), fetch: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan(
        number=0, service=service, seq_ids=(), new_tokens=(), sampled=(), evict=evict, fetch=fetch
    )


def _load(folder: Path, dtype: str, threads: int | None) -> ModelSet:
    """The models, with their images in a cache of their own."""
    os.environ["SHOAL_CACHE"] = str(folder / "cache")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    services = [
        Service(name=f"model {seed}", model="smollm2-like", dtype=dtype, weights="random", weights_seed=seed)
        for seed in range(2)
    ]
    folders = {service.name: folder for service in services}
    return load_models(services, folders, threads=threads, weights_bytes=4 << 30, progress=print)


def measure_idle(bench: Bench, rounds: int, table: Table) -> None:
    """Fetches by the executor against plain reads, in turns."""
    service = bench.services[0]
    image = bench.image(service)
    fresh = replace(image, memory=WeightMemory(image.num_bytes), place=Place.ABSENT)
    bench.fetch(service)  # compares checksums
    bench.evict(service)
    fetches, reads = [], []
    for _ in range(rounds):
        fetches.append(bench.fetch(service))
        bench.evict(service)
        began = time.perf_counter()
        read_weights(fresh, check=False)
        reads.append(time.perf_counter() - began)
        fresh.memory.release()
    for what, seconds in (("fetch, idle", fetches), ("preadv", reads)):
        table.add_row(what, *_columns(image, median(seconds)), "")
    table.add_row("their ratio", "", "", f"{median(fetches) / median(reads):.2f}")


def measure_beside_decodes(bench: Bench, rounds: int, table: Table) -> None:
    """Decodes of one model, with and without a fetch of the other."""
    busy, coming = bench.services
    bench.fetch(busy)
    decodes = Decodes(bench, busy)
    alone, beside, fetches = [], [], []
    for _ in range(rounds):
        for _ in range(DECODES):
            alone.append(_seconds(decodes))
        bench.start_fetch(coming)
        while (arrival := bench.arrival()) is None:
            beside.append(_seconds(decodes))
        fetches.append(arrival.seconds)
        bench.evict(coming)
        decodes.end()
        decodes = Decodes(bench, busy)
    decodes.end()
    bench.evict(busy)
    image = bench.image(coming)
    table.add_row("fetch, beside decodes", *_columns(image, median(fetches)), "")
    table.add_row("a decode alone", f"{median(alone) * 1e3:.2f}", "", "")
    slower = median(beside) / median(alone)
    table.add_row("a decode beside a fetch", f"{median(beside) * 1e3:.2f}", "", f"{slower:.2f}")


def _seconds(decodes: Decodes) -> float:
    began = time.perf_counter()
    decodes.step()
    return time.perf_counter() - began


def measure_many(bench: Bench, moves: int, console: Console) -> None:
    """Many evictions and fetches: outputs and memory."""
    process, random = psutil.Process(), Random(0)
    expected = {}
    for service in bench.services:
        bench.fetch(service)
        expected[service] = bench.generate(service, 3)
        bench.evict(service)
    began, equal = process.memory_info().rss, True
    for number in range(moves):
        service = random.choice(bench.services)
        bench.fetch(service)
        if number % 10 == 0:
            equal = equal and bench.generate(service, 3) == expected[service]
        bench.evict(service)
    grown = (process.memory_info().rss - began) / 2**20
    console.print(
        f"{moves} evictions and fetches: outputs {'stayed the same' if equal else 'CHANGED'}, memory with all"
        f" weights away grew by {grown:.1f} MiB from {began / 2**20:.0f} MiB"
    )


def _columns(image: WeightImage, seconds: float) -> tuple[str, str]:
    return f"{seconds * 1e3:.1f}", f"{image.num_bytes / seconds / 1e9:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="int8", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--threads", type=int, help="CPU threads of steps; all cores by default")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--moves", type=int, default=1000)
    options = parser.parse_args()
    bench = Bench(options.dtype, options.threads)
    image = bench.image(bench.services[0])
    table = Table(title=f"{image.num_bytes / 1e6:.0f} MB of weights in {options.dtype}, medians")
    for column in ("", "ms", "GB/s", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    with print_at_end(table):
        measure_idle(bench, options.rounds, table)
        measure_beside_decodes(bench, options.rounds, table)
    measure_many(bench, options.moves, Console())
    bench.close()


if __name__ == "__main__":
    main()
