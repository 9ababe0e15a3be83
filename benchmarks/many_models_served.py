"""A server of many models on CPUs, whose memory for weights holds a few: tokens on time, by residency policy.

    python -m benchmarks.many_models_served --traces FOLDER [--models 20] [--memory-for 5] [--rate 0.05]
        [--seconds 60] [--rounds 3] [--policies turns fcfs] [--bandwidth 200MB/s] [--peer NAME=URL]

The models are SmolLM2 with its weights changed by 1% noise, each a folder of its own in ``--folder`` (400 MB;
made once), and are served in int8. FOLDER has the files of ``benchmarks.many_models``: popularity has the
skew of the Azure Functions sample, lengths are those of ShareGPT, divided by ``--shorten``. Requests come in
bursts for one model; ``--rate`` is the mean number per second over models.

Each configuration is a ``shoal serve`` of its own, started anew in each round, and all are given the same
requests over HTTP: ``resident`` holds all weights, the others those of ``--memory-for`` models. Answers have
fixed lengths. A token is on time if it comes within 5 s after the request, and for each token before it 4
times the time that one takes alone. "same": answers equal to those of ``resident`` in the same round; "wait":
seconds for weights, mean over waits. Peers (servers that are running already, with the same models under the
names m00, m01, ...) are given the requests, too. Give the computer nothing else to do.
"""

import argparse
import asyncio
import csv
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.many_models import FUNCTIONS, LENGTHS, RESIDENT, popularity
from benchmarks.serving import serving
from shoal.bench import Answer, Call, LoadRun, Target, run_load
from shoal.core import Service, TokenDeadlines
from shoal.schedule.policies.residency import RESIDENCY_POLICIES

WORDS = "river stone light market winter garden engine letter window bridge copper music".split()  # noqa: SIM905
FIRST_TOKEN_S = 5.0
TIMES_ALONE = 4.0
"""Deadline for each further token, in times between tokens of a single stream."""
PORT = 18_190


def model_name(number: int) -> str:
    return f"m{number:02d}"


def make_models(folder: Path, count: int) -> None:
    """Write the models that are missing."""
    import torch
    from safetensors.torch import load_file, save_file

    from shoal.models import resolve_service

    missing = [number for number in range(count) if not (folder / model_name(number) / "done").exists()]
    if not missing:
        return
    original = resolve_service(Service(name="smollm2", model="smollm2"))
    for number in missing:
        print(f"making model {number + 1} of {count}", file=sys.stderr)
        target = folder / model_name(number)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        random = torch.Generator().manual_seed(number)
        for file in original.iterdir():
            if file.suffix == ".safetensors":
                tensors = load_file(file)
                noisy = {
                    name: (each.float() * (1 + 0.01 * torch.randn(each.shape, generator=random))).to(
                        each.dtype
                    )
                    for name, each in tensors.items()
                }
                save_file(noisy, target / file.name, metadata={"format": "pt"})
            elif file.is_file():
                shutil.copy(file, target / file.name)
        (target / "done").touch()


def workload(options: argparse.Namespace, seed: int) -> list[Call]:
    """Bursts of calls at random times, each for one model."""
    random = np.random.default_rng(seed)
    with (options.traces / LENGTHS).open(newline="") as rows:
        pairs = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(rows)]
    shares = popularity(options.traces / FUNCTIONS, options.models)
    calls: list[Call] = []
    for number, share in enumerate(shares):
        expected = options.rate * options.models * options.seconds * share
        for begin_s in random.uniform(0, options.seconds, random.poisson(expected / options.burst)).tolist():
            for _ in range(random.geometric(1 / options.burst)):
                prompt, output = pairs[int(random.integers(len(pairs)))]
                words = random.choice(WORDS, max(1, min(400, prompt // options.shorten)))
                call = Call(
                    id=f"r{len(calls)}",
                    service=model_name(number),
                    text=" ".join(words.tolist()),
                    output_tokens=max(2, min(200, output // options.shorten)),
                    arrival_ns=round((begin_s + random.uniform(0, 1.0)) * 1e9),
                )
                calls.append(call)
    return sorted(calls, key=lambda call: call.arrival_ns)


def server(options: argparse.Namespace, policy: str) -> AbstractContextManager[str]:
    """A server with a residency policy, or with all weights resident; its address."""
    services = [
        {"name": model_name(number), "model": str(options.folder / model_name(number)), "dtype": "int8"}
        for number in range(options.models)
    ]
    config: dict[str, Any] = {
        "services": services,
        "kv_cache": {"memory": "1GiB"},
    }
    count = options.models if policy == RESIDENT else options.memory_for
    config["weights"] = {"memory": f"{count * options.model_mib}MiB"}
    if policy != RESIDENT:
        config["weights"]["policy"] = policy
        if options.bandwidth:
            config["weights"]["bandwidth"] = options.bandwidth
    return serving(config, PORT, verbose=options.verbose)


async def wait_until_ready(client: httpx.AsyncClient) -> float:
    """Seconds until the server is ready."""
    began = time.monotonic()
    while True:
        try:
            if (await client.get("/health")).status_code == 200:
                return time.monotonic() - began
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.05)


async def wait_for_fetches(client: httpx.AsyncClient) -> None:
    """Wait until free memory is filled with weights."""
    before = -1.0
    while before != (before := total((await client.get("/metrics")).text, "shoal_weight_fetches_total")):
        await asyncio.sleep(3.0)  # figures of an engine are as old as its last report


async def time_alone(target: Target) -> float:
    """Seconds between tokens of a single stream; median."""
    gaps: list[float] = []
    for _ in range(3):
        answer = Answer(Call(id="alone", service=model_name(0), text="river stone", output_tokens=60))
        await target.send(answer)
        gaps += (np.diff(answer.chunks_ns) / 1e9).tolist()
    return statistics.median(gaps)


def tokens_on_time(answer: Answer, token_s: float) -> float:
    """Tokens of a call on time. Chunks of text stand for tokens, of which some have no text of their own."""
    deadlines = TokenDeadlines(answer.sent_ns, FIRST_TOKEN_S, TIMES_ALONE * token_s)
    in_time = sum(deadlines.num_on_time(number, 1, at_ns) for number, at_ns in enumerate(answer.chunks_ns))
    return answer.call.output_tokens * in_time / max(1, len(answer.chunks_ns))


async def measure(
    url: str, calls: Sequence[Call], token_s: float | None
) -> tuple[dict[str, float], list[Answer]]:
    """Figures of a server that was started just now, and its answers."""
    extra = {"temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        ready_s = await wait_until_ready(client)
        await wait_for_fetches(client)
        async with Target.open(url, headers={}, chat=False, extra=extra) as target:
            alone_s = await time_alone(target)
            run = LoadRun()
            await run_load(target, calls, run)
        metrics = (await client.get("/metrics")).text
    token_s = alone_s if token_s is None else token_s
    firsts = [(answer.chunks_ns[0] - answer.sent_ns) / 1e9 for answer in run.answers if answer.chunks_ns]
    waits = total(metrics, "shoal_weight_waits_total")
    return {
        "ready_s": ready_s,
        "alone_ms": alone_s * 1e3,
        "failed": sum(answer.error is not None for answer in run.answers),
        "on_time": sum(tokens_on_time(answer, token_s) for answer in run.answers)
        / sum(call.output_tokens for call in calls),
        "ttft_s": statistics.fmean(firsts or [float("nan")]),
        "ttft_p99_s": float(np.quantile(firsts or [float("nan")], 0.99)),
        "took_s": (run.end_ns - run.begin_ns) / 1e9,
        "fetches": total(metrics, "shoal_weight_fetches_total"),
        "wait_s": total(metrics, "shoal_weight_wait_seconds_total") / waits if waits else 0.0,
        "recomputed": total(metrics, "shoal_recomputed_tokens_total"),
    }, run.answers


def total(metrics: str, name: str) -> float:
    """Sum of a metric over its labels."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def print_row(name: str, row: Mapping[str, float]) -> None:
    kinds = {"on_time": ".1%", "ttft_s": ".2f", "ttft_p99_s": ".1f", "took_s": ".0f", "fetches": ".0f"}
    kinds |= {"wait_s": ".2f", "recomputed": ".0f", "failed": ".0f", "same": ".0f"}
    kinds |= {"ready_s": ".1f", "alone_ms": ".1f"}
    print(f"| {name} | {' | '.join(format(row[key], kind) for key, kind in kinds.items())} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "shoal-models")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--memory-for", type=int, default=5)
    parser.add_argument("--model-mib", type=int, default=200, help="of the weights of a model")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--burst", type=float, default=3.0, help="requests of a burst, mean")
    parser.add_argument("--shorten", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="*", default=[RESIDENT, *RESIDENCY_POLICIES])
    parser.add_argument("--bandwidth")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    make_models(options.folder, options.models)
    columns = "on time, TTFT s, p99, took s, fetches, wait s, recomputed, failed, same, ready s, alone ms"
    print(f"| | {' | '.join(columns.split(', '))} |\n|{'---|' * 12}")
    rows: list[dict[str, object]] = []
    for number in range(options.rounds):
        calls = workload(options, number)
        token_s: float | None = None
        reference: list[Answer] = []
        for name in options.policies:
            with server(options, name) as url:
                row, answers = asyncio.run(measure(url, calls, token_s))
            if name == RESIDENT:
                token_s, reference = row["alone_ms"] / 1e3, answers
            row["same"] = sum(
                "".join(one.pieces) == "".join(two.pieces)
                for one, two in zip(answers, reference, strict=False)
            )
            print_row(f"{name} {number + 1}, {len(calls)} calls", row)
            rows.append({"name": name, "round": number, "calls": len(calls), **row})
        for peer in options.peer:
            name, url = peer.split("=", 1)
            row, _ = asyncio.run(measure(url, calls, token_s))
            row["same"] = 0
            print_row(f"{name} {number + 1}", row)
            rows.append({"name": name, "round": number, "calls": len(calls), **row})
    print_medians(rows)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def print_medians(rows: Sequence[Mapping[str, object]]) -> None:
    """Median over the rounds, and the least and the most."""
    print()
    for name in dict.fromkeys(row["name"] for row in rows):
        found = [row for row in rows if row["name"] == name]
        texts = []
        for key in ("on_time", "ttft_s", "ttft_p99_s"):
            values = [float(row[key]) for row in found]  # type: ignore[arg-type]
            texts.append(f"{key} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        print(f"{name}: {', '.join(texts)}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
