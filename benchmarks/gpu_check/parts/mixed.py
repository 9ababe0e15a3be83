"""GPU check, part `mixed`: three models in one engine under full load.

Each model has some streams; a stream's next request arrives when the last one has ended, until all have
had some. So prompts arrive during decodes, and the load is as high as the device allows. The same requests
are answered twice: with recorded steps of prompts, and with steps of prompts that the host launches kernel by
kernel. Decodes are recorded in both.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_check.cases import Cases, Figures, SkipCase, quantile
from benchmarks.gpu_check.models import WAYS, engine_of, load, require_memory, service_of, steps_of_prompts
from benchmarks.gpu_check.shapes import LLAMA_1B, LLAMA_8B, TINY, VOCABULARY, Llama
from benchmarks.gpu_check.timing import free_bytes, traced
from shoal.core import Request, SamplingParams
from shoal.engine import Engine


@dataclass(frozen=True)
class Load:
    """streams: of each model. requests: of each stream. prompts, outputs: least and most tokens."""

    models: tuple[Llama, ...]
    streams: int
    requests: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    traced_steps: int
    seconds: float
    """For all requests, roughly."""


_LINE = "{{tokens/s:.0f}} tokens/s, TPOT p50 {{TPOT p50, ms:.1f}} p99 {{TPOT p99, ms:.0f}} ms ({})"
_MODELS = (LLAMA_1B, replace(LLAMA_1B, name="Llama-1B-b"), LLAMA_8B)
"""Two of them need the same kernels, which saves the time of compiling others."""
USUAL = Load(_MODELS, 8, 3, (100, 2000), (32, 128), 30, 6)
TINY_LOAD = Load(TINY, 2, 1, (4, 40), (2, 6), 4, 0)


def run(cases: Cases) -> None:
    chosen_load = TINY_LOAD if cases.tiny else USUAL
    seconds = chosen_load.seconds
    with TemporaryDirectory() as folder:
        mixed = _Mixed(chosen_load, cases.device, Path(folder))
        cases.run("start", mixed.start, seconds=2 * seconds)
        for way, recorded in WAYS.items():
            cases.run(way, partial(mixed.measure, recorded), seconds=seconds, line=_LINE.format(way))
            for name, latencies in mixed.by_model.items():
                cases.report(f"{way}, {name}", "ok", latencies.figures())
        for way, recorded in WAYS.items():
            line = f"idle {{GPU idle:.0%}} ({way})"
            cases.run(f"{way}, traced", partial(mixed.trace, recorded), seconds=seconds / 2, line=line)


@dataclass
class Latencies:
    """Latencies of ended requests."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between tokens of a request."""

    def add(self, times: Sequence[float]) -> None:
        """times: of a request's arrival and of its tokens."""
        arrived, first, *later = times
        self.ttft_s.append(first - arrived)
        if later:
            self.tpot_s.append((later[-1] - first) / len(later))
            self.gaps_s += [end - begin for begin, end in pairwise([first, *later])]

    def figures(self) -> Figures:
        figures: dict[str, float | str] = {"requests": len(self.ttft_s)}
        for name, times in (("TPOT", self.tpot_s), ("gap", self.gaps_s), ("TTFT", self.ttft_s)):
            for share in (50, 99):
                figures[f"{name} p{share}, ms"] = 1e3 * quantile(times, share / 100)
        return figures


class _Mixed:
    def __init__(self, load: Load, device: str, folder: Path) -> None:
        self._load = load
        self._device = device
        self._folder = folder
        self._engine: Engine | None = None
        self._rounds = 0
        """How many times requests were answered."""
        self._running: dict[str, tuple[Llama, int, int, list[float]]] = {}
        """Model, stream, how many requests follow, and times of arrival and of tokens, by running request."""
        self.by_model: dict[str, Latencies] = {}

    def start(self) -> Figures:
        """Load the models, build the engine, and answer a request of each stream in both ways."""
        models, streams = self._load.models, self._load.streams
        longest = self._load.prompts[1] + self._load.outputs[1]
        kv_bytes = sum(model.kv_bytes(streams, longest) for model in models) * 3 // 2
        require_memory(self._device, models, kv_bytes)
        services = [service_of(model, self._folder) for model in models]
        begun = time.perf_counter()
        loaded = load(self._device, services)
        free = free_bytes(self._device)
        loaded_at = time.perf_counter()
        self._engine = engine_of(loaded, services, kv_bytes, depth=2)
        built_at = time.perf_counter()
        graph_bytes = free - free_bytes(self._device) - kv_bytes if self._device != "cpu" else 0
        for recorded in WAYS.values():
            with steps_of_prompts(recorded):
                self._answer(1)
        return {
            "loading, s": loaded_at - begun,
            "compiling and recording, s": built_at - loaded_at,
            "graphs and code, GiB": graph_bytes / 2**30,
            "first requests, s": time.perf_counter() - built_at,
        }

    def measure(self, recorded: bool) -> Figures:
        with steps_of_prompts(recorded):
            seconds = self._answer(self._load.requests)
        overall = Latencies()
        for latencies in self.by_model.values():
            overall.ttft_s += latencies.ttft_s
            overall.tpot_s += latencies.tpot_s
            overall.gaps_s += latencies.gaps_s
        tokens = len(overall.ttft_s) + len(overall.gaps_s)
        return {**overall.figures(), "tokens/s": tokens / seconds, "seconds": seconds}

    def trace(self, recorded: bool) -> Figures:
        """Kernels of some steps under load, which tracing slows down."""
        load, engine = self._load, self._started
        self._submit_all(load.requests)

        def make_steps() -> None:
            for _ in range(load.traced_steps):
                self._step(engine)

        with steps_of_prompts(recorded):
            make_steps()
            trace = traced(make_steps, self._device)
        engine.cancel_all()
        while engine.busy:
            engine.step()
        self._running.clear()
        if trace is None:
            raise SkipCase("this device reports no kernels")
        kernels = trace.kernels / load.traced_steps
        return {"kernels a step": kernels, "GPU idle": trace.idle, "longest": trace.longest}

    @property
    def _started(self) -> Engine:
        if self._engine is None:
            raise SkipCase("it did not start")
        return self._engine

    def _answer(self, requests: int) -> float:
        """Answer so many requests of each stream; returns the elapsed seconds."""
        engine, begun = self._started, time.perf_counter()
        self.by_model = {model.name: Latencies() for model in self._load.models}
        self._submit_all(requests)
        while self._running:
            self._step(engine)
        return time.perf_counter() - begun

    def _submit_all(self, requests: int) -> None:
        """Submit the first request of each stream."""
        self._rounds += 1
        for model in self._load.models:
            for stream in range(self._load.streams):
                self._submit(model, stream, requests - 1)

    def _step(self, engine: Engine) -> None:
        """One step; submits the next request of each stream whose request ended."""
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"request {event.request_id} failed: {event.error}")
            model, stream, following, times = self._running[event.request_id]
            times += [now] * len(event.tokens)
            if event.finish is not None:
                self.by_model[model.name].add(times)
                del self._running[event.request_id]
                if following:
                    self._submit(model, stream, following - 1)

    def _submit(self, model: Llama, stream: int, following: int) -> None:
        """Requests have the same lengths in each round, and tokens of their own, which no cache has."""
        name = f"{model.name}, {stream}, {following}"
        draw = random.Random(name)
        length, output = draw.randint(*self._load.prompts), draw.randint(*self._load.outputs)
        name = f"{name}, {self._rounds}"
        prompt = random.Random(name).choices(range(100, VOCABULARY), k=length)
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._running[name] = model, stream, following, [time.perf_counter()]
        self._started.submit(
            Request(
                id=name,
                service=model.name,
                prompt=prompt,
                sampling=sampling,
                arrival_ns=time.monotonic_ns(),
            )
        )
