"""Breakdown of the time of a step by parts: decode steps of several sizes, and a prompt's chunk.

    python -m benchmarks.step_profile                                   # smollm2, bfloat16, all cores
    python -m benchmarks.step_profile --model gemma3-270m --rows 1 16 --prefill 512
    python -m benchmarks.step_profile --threads 1                       # by CPU time, on a busy machine

The real executor runs plans with a real model and a KV pool of 16-token blocks. Decode steps have
``--context`` tokens in every row; a prefill chunk is a prompt's first ``--prefill`` tokens. The kinds of
steps take turns for ``--rounds`` rounds, and a row shows the parts of the one with the median total, in
milliseconds:

- *products*: matrix products of the layers, with their epilogues. *head*: that of the vocabulary.
- *cache*: writing keys and values to the pool, and gathering them (not needed by native attention).
  *attention*: the rest of the attention calls.
- *sampling*, and *packing* (building the batch).
- *small*: other torch operations and native kernels: norms, rotary embeddings, residuals.
- *Python*: the rest: the interpreter, transformers' code, and dispatching.

Most parts are timed by wrapping the functions that compute them, without nested wrapped functions: on a CPU
nothing is asynchronous. Torch operations outside the wrapped functions are too many and too small for that;
``torch.profiler`` traces them in a second run of each step. *small* is the sum over these *operations*, each
the fastest of the rounds. The profiler slows them down by about a microsecond each, so *small* is a little
too large and *Python* too small.

Layers that native code computes in one call are computed one operation at a time for this, with the same
bits. *as it runs* is the whole step without that.

With one thread, CPU time is measured, which other processes affect less; with more, elapsed time.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.core import NewSequence, SamplingParams, Service, StepPlan
from shoal.engine.build import default_threads
from shoal.execute.attention.kv_views import MergedCache
from shoal.execute.attention.selector import ATTENTION_BACKENDS
from shoal.execute.executors import make_executor
from shoal.execute.linear.native_product import NativeProduct
from shoal.execute.model.model_set import ModelSet, load_models
from shoal.execute.torch_executor import TorchExecutor
from shoal.kvcache import BlockPool, plan_layout
from shoal.models import resolve_model
from shoal.native import NativeLibrary

SERVICE = "profiled"
BLOCK_SIZE = 16
PARTS = ("products", "attention", "cache", "small", "head", "sampling", "packing", "Python")
SCOPE = "part: "


class Clock:
    """Times nested functions, each without the nested ones."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By part."""
        self.scopes = False
        """Whether the functions also appear in the trace of ``torch.profiler``."""
        self._now = now
        self._inside: list[tuple[str, float]] = []

    def wrap(self, owner: Any, name: str, part: str | Callable[[Any], str | None]) -> None:
        """Time ``owner.name`` as ``part``, or as ``part`` of its first argument (None: not timed)."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(
        self, function: Callable[..., Any], part: str | Callable[[Any], str | None]
    ) -> Callable[..., Any]:
        """``function`` with timing."""

        def call(*args: Any, **kwargs: Any) -> Any:
            label = part if isinstance(part, str) else part(args[0])
            if label is None:
                return function(*args, **kwargs)
            if self.scopes:
                with record_function(SCOPE + label):
                    return function(*args, **kwargs)
            started = self._now()
            self._inside.append((label, 0.0))
            try:
                return function(*args, **kwargs)
            finally:
                took = self._now() - started
                self.seconds[label] += took - self._inside.pop()[1]
                if self._inside:
                    above, inside = self._inside[-1]
                    self._inside[-1] = (above, inside + took)

        return call

    @property
    def part(self) -> str | None:
        """The part being timed."""
        return self._inside[-1][0] if self._inside else None


@dataclass(frozen=True)
class Step:
    """Times of one step."""

    kind: str
    parts_ms: dict[str, float]
    """By part; small torch operations still count as *Python*."""
    operations_ms: list[float]
    """Of traced small torch operations."""
    as_it_runs_ms: float
    """Of the whole step with native calls of layers."""

    @property
    def total_ms(self) -> float:
        return sum(self.parts_ms.values())


class Bench:
    """The real executor with one model, and plans made by hand."""

    def __init__(self, models: ModelSet, kv_bytes: int) -> None:
        self.executor = make_executor(
            models, layout := plan_layout(models.kv_shapes, memory_bytes=kv_bytes, block_size=BLOCK_SIZE)
        )
        self._pool = BlockPool(layout)
        model = models.services[SERVICE].model
        self._forward, self._vocab = model.forward, model.vocab_size
        self._number = 0

    @contextmanager
    def layers_apart(self) -> Iterator[None]:
        """Within the block, layers are computed one operation at a time."""
        native = getattr(self._forward, "native_layers", [])
        kept = list(native)
        native.clear()
        try:
            yield
        finally:
            native.extend(kept)

    @contextmanager
    def sequences(self, rows: int, known: int, computed: int) -> Iterator[tuple[NewSequence, ...]]:
        """``rows`` sequences with blocks for ``known`` tokens, of which ``computed`` have arbitrary KV."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
        tables = []
        for _ in range(rows):
            blocks = self._pool.allocate(SERVICE, -(-known // BLOCK_SIZE))
            if blocks is None:
                raise SystemExit("the KV pool is too small for this; --kv-mib makes it larger")
            tables.append(blocks)
        tokens = torch.randint(0, self._vocab, (rows, known)).tolist()
        first, self._number = self._number, self._number + rows
        yield tuple(
            NewSequence(first + at, tokens[at], known, computed, tuple(table), sampling, seed=at)
            for at, table in enumerate(tables)
        )
        for table in tables:
            self._pool.free(SERVICE, table)

    def step(self, joined: tuple[NewSequence, ...], new_tokens: int) -> None:
        """One step in which the sequences join, compute ``new_tokens`` each, sample, and leave."""
        ids = tuple(sequence.seq_id for sequence in joined)
        plan = StepPlan(
            number=0,
            service=SERVICE,
            seq_ids=ids,
            new_tokens=(new_tokens,) * len(ids),
            sampled=tuple(range(len(ids))),
            joined=joined,
        )
        after = StepPlan(number=0, service=SERVICE, seq_ids=(), new_tokens=(), sampled=(), left=ids)
        for each in (plan, after):
            self.executor.submit(each)
            self.executor.collect()


def time_functions(clock: Clock, models: ModelSet) -> None:
    """Wrap the functions of all parts, except native kernels (``time_kernels``)."""
    module = models.services[SERVICE].model.module
    head = module.get_output_embeddings()
    packed = {id(part) for part in module.modules() if hasattr(part, "gate") and hasattr(part, "down")}

    def product(part: Any) -> str | None:
        if part is head:
            return "head"
        return "products" if hasattr(part, "in_features") or id(part) in packed else None

    for kind in {type(part) for part in module.modules() if product(part)} | {type(head)}:
        clock.wrap(kind, "__call__", product)
    clock.wrap(NativeProduct, "__call__", lambda _: None if clock.part == "head" else "products")
    for name in ("attend", "attend_packed"):
        clock.wrap(models.services[SERVICE].backend, name, "attention")
    for name in ("write", "gather"):
        clock.wrap(MergedCache, name, "cache")
    clock.wrap(TorchExecutor, "_compute", "packing")
    clock.wrap(TorchExecutor, "_forward", "Python")
    clock.wrap(TorchExecutor, "_sample", "sampling")


def time_kernels(clock: Clock) -> None:
    """Time native kernels outside other parts; call it before any kernel is taken from the library."""
    plain = NativeLibrary.kernel

    def kernel(library: NativeLibrary, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        function = plain(library, name, *arguments, result=result)
        return clock.timed(function, lambda _: "small" if clock.part == "Python" else None)

    NativeLibrary.kernel = kernel  # type: ignore[method-assign, assignment]


def small_operations(traced: profile) -> list[float]:
    """Milliseconds of each torch operation in ``_forward`` outside all other wrapped functions."""
    events: list[Any] = traced.events()  # type: ignore[no-untyped-call]
    above = [event for event in events if event.name == SCOPE + "Python"]
    found = [
        event for scope in above for event in scope.cpu_children if not event.name.startswith((SCOPE, "["))
    ]
    return [event.cpu_time_total / 1e3 for event in found]


def measure(bench: Bench, clock: Clock, kind: str, joined: tuple[NewSequence, ...], new_tokens: int) -> Step:
    """Run a step as it is, one with timers, and one under the profiler."""
    clock.seconds.clear()
    bench.step(joined, new_tokens)
    as_it_runs_ms = 1e3 * sum(clock.seconds.values())
    with bench.layers_apart():
        parts, traced = _parts(bench, clock, joined, new_tokens)
    return Step(kind, parts, small_operations(traced), as_it_runs_ms)


def _parts(
    bench: Bench, clock: Clock, joined: tuple[NewSequence, ...], new_tokens: int
) -> tuple[dict[str, float], profile]:
    """Milliseconds of each part, and the trace of another step."""
    clock.seconds.clear()
    bench.step(joined, new_tokens)
    parts = {name: 1e3 * clock.seconds[name] for name in PARTS}
    clock.scopes = True
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        bench.step(joined, new_tokens)
    clock.scopes = False
    return parts, traced


def medians(steps: list[Step]) -> list[Step]:
    """The step with the median total of each kind, with the fastest time of each operation."""
    kinds: dict[str, list[Step]] = {}
    for step in steps:
        kinds.setdefault(step.kind, []).append(step)
    shown = []
    for kind, same in kinds.items():
        fastest = [min(times) for times in zip(*[step.operations_ms for step in same], strict=True)]
        parts = dict(sorted(same, key=lambda step: step.total_ms)[len(same) // 2].parts_ms)
        parts["small"] += sum(fastest)
        parts["Python"] -= sum(fastest)
        shown.append(Step(kind, parts, fastest, median(step.as_it_runs_ms for step in same)))
    return shown


def show(title: str, steps: list[Step]) -> None:
    table = Table(title=title)
    for column in ("step", "as it runs, ms", "total, ms", *PARTS, "operations"):
        table.add_column(column, justify="right")
    for step in steps:
        cells = [f"{step.parts_ms[name]:.2f}" for name in PARTS]
        totals = f"{step.as_it_runs_ms:.1f}", f"{step.total_ms:.1f}"
        table.add_row(step.kind, *totals, *cells, str(len(step.operations_ms)))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="auto", choices=ATTENTION_BACKENDS)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=192, help="tokens that each decoding row attends")
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048], help="tokens of a prompt's chunk")
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every step here, too")
    args = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    threads = args.threads or default_threads()
    clock = Clock(time.thread_time if threads == 1 else time.perf_counter)
    time_kernels(clock)
    models = load_models(
        [Service(name=SERVICE, model=args.model, dtype=args.dtype)],
        {SERVICE: resolve_model(args.model)},
        threads=threads,
        attention=args.attention,
    )
    time_functions(clock, models)
    bench = Bench(models, args.kv_mib << 20)
    bench.executor.store.buffer.zero_()
    kinds = [(f"decode {rows}", rows, args.context, 1) for rows in args.rows]
    kinds += [(f"prefill {tokens}", 1, tokens, tokens) for tokens in args.prefill]
    steps: list[Step] = []
    for round_number in range(-1, args.rounds):  # the first round only warms up
        for kind, rows, known, new_tokens in kinds:
            with bench.sequences(rows, known, known - new_tokens) as joined:
                step = measure(bench, clock, kind, joined, new_tokens)
            if round_number >= 0:
                steps.append(step)
    show(
        f"{args.model}, {args.dtype}, threads: {threads}; one step, medians of {args.rounds}", medians(steps)
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(step) for step in steps], indent=1) + "\n")


if __name__ == "__main__":
    main()
