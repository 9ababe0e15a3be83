"""Cost of structured output: throughput with some constrained streams, relative to none.

    python -m benchmarks.structured_output                    # smollm2, 16 of 64 streams, 5 rounds of each
    python -m benchmarks.structured_output --model gemma3-270m --distinct 16

One engine, alternating rounds. All rounds decode equally many tokens in equally many rows: the schema has an
array that cannot end earlier. Prints tokens per second of each round and medians, the wait of a step for
masks after its forward pass, and the time of computing a mask.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
from rich.console import Console
from rich.table import Table

from shoal.core import Grammar, GrammarKind, Request, SamplingParams, Service
from shoal.engine import Engine, EngineOptions, build_engine
from shoal.execute.grammar.masks import RowMasks
from shoal.execute.grammar.messages import SequenceTokens, Step
from shoal.execute.grammar.process import Masks, compile_grammar
from shoal.execute.protocol import Executor
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer, resolve_model

SERVICE = "bench"


@dataclass
class Waits:
    """Measures an executor's waits for masks."""

    seconds: list[float] = field(default_factory=list)

    def watch(self, executor: Any) -> Executor:
        """Wrap the executor's mask reader."""
        finish = executor._masks.finish

        def timed() -> RowMasks | None:
            begun = time.perf_counter()
            masks: RowMasks | None = finish()
            if masks is not None:
                self.seconds.append(time.perf_counter() - begun)
            return masks

        executor._masks.finish = timed
        watched: Executor = executor
        return watched


def people(number: int) -> Grammar:
    """A schema of a long list of people, different for each number."""
    properties = {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99 + number},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "fish"]}, "maxItems": 3},
    }
    person = {"type": "object", "properties": properties, "required": [*properties]}
    schema = {"type": "array", "items": {**person, "additionalProperties": False}, "minItems": 500}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def decode(engine: Engine, prompt: Sequence[int], grammars: Sequence[Grammar | None], tokens: int) -> float:
    """Tokens per second of one stream per grammar, from the first step in which all decode."""
    requests = [
        Request(
            id=f"{time.monotonic_ns()}-{number}",
            service=SERVICE,
            prompt=[*prompt, 100 + number],
            sampling=SamplingParams(max_tokens=tokens, ignore_eos=grammar is None, grammar=grammar),
            seed=number,
        )
        for number, grammar in enumerate(grammars)
    ]
    leases = [
        engine.prepare(SERVICE, grammar)
        for grammar in {grammar for grammar in grammars if grammar is not None}
    ]
    for lease in leases:
        lease.ready.result()
    engine.submit(*requests)
    for lease in leases:
        lease.release()
    started, made = time.perf_counter(), 0
    seen: set[str] = set()
    while engine.busy:
        if engine.idle:
            time.sleep(0.0005)
        for event in engine.step():
            assert event.error is None, event.error
            if len(seen) < len(requests):
                seen.add(event.request_id)
                if len(seen) == len(requests):
                    started, made = time.perf_counter(), 0
            else:
                made += len(event.tokens)
    return made / (time.perf_counter() - started)


def mask_times(folder: Path, vocab_size: int, eos: Sequence[int], prompt: str) -> list[float]:
    """Seconds of each mask along a text that follows the schema, computed in this process."""
    tokenizer = llguidance.LLTokenizer(
        str(folder / "tokenizer.json"), n_vocab=vocab_size, eos_token=list(eos)
    )
    person = {"name": prompt[:20], "age": 31, "pets": ["cat", "fish"]}
    text = json.dumps([person] * 40)[:-1]
    masks = Masks(compile_grammar(tokenizer, people(0)), eos, vocab_size)
    new: list[int] = []
    times = []
    for token in Tokenizer.from_folder(folder).encode(text, add_special_tokens=False):
        begun = time.perf_counter()
        answer, _ = masks.answer(Step([SequenceTokens(1, new)], [], 1.0))
        times.append(time.perf_counter() - begun)
        if answer.failures:
            break
        new = [token]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--constrained", type=int, default=16)
    parser.add_argument("--distinct", type=int, default=1, help="different grammars among them")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    waits = Waits()
    options = EngineOptions(
        services=(Service(name=SERVICE, model=arguments.model),),
        kv_cache=KVCacheOptions(memory_bytes=1 << 30, prefix_caching=False),
        device=arguments.device,
    )
    engine, info = build_engine(options, {SERVICE: folder}, wrap=waits.watch)
    prompt = Tokenizer.from_folder(folder).encode("A list of people and their pets:\n")
    plain: list[Grammar | None] = [None] * arguments.streams
    mixed = list(plain)
    for number in range(arguments.constrained):
        mixed[number * arguments.streams // arguments.constrained] = people(number % arguments.distinct)
    speeds: dict[str, list[float]] = {"none": [], "some": []}
    decode(engine, prompt, mixed, 8)
    waits.seconds.clear()
    for _ in range(arguments.rounds):
        for name, grammars in (("none", plain), ("some", mixed)):
            speeds[name].append(decode(engine, prompt, grammars, arguments.tokens))
    engine.close()
    table = Table("constrained", "tokens per second of each round", "median")
    for name, count in (("none", 0), ("some", arguments.constrained)):
        rounds = " ".join(f"{speed:.0f}" for speed in speeds[name])
        table.add_row(f"{count} of {arguments.streams}", rounds, f"{statistics.median(speeds[name]):.0f}")
    Console().print(table)
    ratios = [some / none for none, some in zip(speeds["none"], speeds["some"], strict=True)]
    print(f"throughput falls by {1 - statistics.median(ratios):.1%} (median over rounds)")
    waited = sorted(waits.seconds)
    print(
        f"a step waits for masks after its forward pass: median {1e6 * statistics.median(waited):.0f} us, "
        f"99% {1e6 * waited[int(0.99 * len(waited))]:.0f} us"
    )
    limits = info.services[SERVICE]
    times = sorted(mask_times(folder, limits.vocab_size, limits.eos_token_ids, "Ada"))
    print(
        f"a mask and its token take: median {1e6 * statistics.median(times):.0f} us, "
        f"mean {1e6 * statistics.fmean(times):.0f} us, 99% {1e6 * times[int(0.99 * len(times))]:.0f} us"
    )


if __name__ == "__main__":
    main()
