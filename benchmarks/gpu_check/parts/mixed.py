"""GPU check, part `mixed`: three models in one engine under full load.

Each model has some streams; a stream's next request arrives when the last one has ended. So prompts always
arrive during decodes, and the load is as high as the device allows.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_check.cases import Cases, Figures, SkipCase, quantile
from benchmarks.gpu_check.models import engine_of, load, require_memory, service_of
from benchmarks.gpu_check.shapes import LLAMA_1B, LLAMA_3B, LLAMA_8B, TINY, VOCABULARY, Llama
from benchmarks.gpu_check.timing import traced
from shoal.core import Request, SamplingParams
from shoal.engine import Engine


@dataclass(frozen=True)
class Load:
    """streams: of each model. prompts, outputs: least and most tokens."""

    models: tuple[Llama, ...]
    streams: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    warm_up_s: float
    measured_s: float
    traced_steps: int


_LINE = (
    "TPOT p50 {TPOT p50, ms:.1f} p99 {TPOT p99, ms:.1f} ms, "
    "TTFT p50 {TTFT p50, ms:.0f} p99 {TTFT p99, ms:.0f} ms"
)
USUAL = Load((LLAMA_1B, LLAMA_3B, LLAMA_8B), 8, (100, 2000), (32, 128), 8, 16, 40)
TINY_LOAD = Load(TINY, 2, (4, 40), (2, 6), 0, 0.2, 4)


def run(cases: Cases) -> None:
    chosen_load = TINY_LOAD if cases.tiny else USUAL
    with TemporaryDirectory() as folder:
        mixed = _Mixed(chosen_load, cases.device, Path(folder))
        seconds = 0.0 if cases.tiny else chosen_load.warm_up_s + chosen_load.measured_s + 5
        cases.run("all", mixed.measure, seconds=seconds, line=_LINE)
        for name, latencies in mixed.by_model.items():
            cases.report(name, "ok", latencies.figures())
        cases.run(
            "steps under load, traced",
            mixed.trace,
            seconds=0.0 if cases.tiny else 5,
            line="idle {GPU idle:.0%}",
        )


@dataclass
class Latencies:
    """Latencies of ended requests."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, times: Sequence[float]) -> None:
        """times: of a request's arrival and of its tokens."""
        arrived, first, *later = times
        self.ttft_s.append(first - arrived)
        if later:
            self.tpot_s.append((later[-1] - first) / len(later))

    def figures(self) -> Figures:
        figures: dict[str, float | str] = {"requests": len(self.ttft_s)}
        for name, times in (("TPOT", self.tpot_s), ("TTFT", self.ttft_s)):
            for share in (50, 99):
                figures[f"{name} p{share}, ms"] = 1e3 * quantile(times, share / 100)
        return figures


class _Mixed:
    def __init__(self, load: Load, device: str, folder: Path) -> None:
        self._load = load
        self._device = device
        self._folder = folder
        self._random = random.Random(0)
        self._running: dict[str, tuple[Llama, list[float]]] = {}
        """Model, and times of the arrival and of the tokens, by running request."""
        self.by_model = {model.name: Latencies() for model in load.models}

    @cached_property
    def _engine(self) -> Engine:
        """The engine, with a request for each stream submitted."""
        models, streams = self._load.models, self._load.streams
        longest = self._load.prompts[1] + self._load.outputs[1]
        kv_bytes = sum(model.kv_bytes(streams, longest) for model in models) * 3 // 2
        require_memory(self._device, models, kv_bytes)
        services = [service_of(model, self._folder) for model in models]
        engine = engine_of(load(self._device, services), services, kv_bytes)
        for model in models:
            for _ in range(streams):
                self._submit_next(engine, model)
        return engine

    def measure(self) -> Figures:
        self._run_for(self._load.warm_up_s)
        measured_s = self._run_for(self._load.measured_s)
        overall = Latencies()
        for latencies in self.by_model.values():
            overall.ttft_s += latencies.ttft_s
            overall.tpot_s += latencies.tpot_s
            overall.tokens += latencies.tokens
        return {**overall.figures(), "tokens/s": overall.tokens / measured_s}

    def trace(self) -> Figures:
        """Kernels of some steps, which tracing slows down."""
        steps = self._load.traced_steps
        engine = self._engine

        def make_steps() -> None:
            for _ in range(steps):
                self._step(engine)

        trace = traced(make_steps, self._device)
        if trace is None:
            raise SkipCase("this device reports no kernels")
        return {"kernels a step": trace.kernels / steps, "GPU idle": trace.idle, "longest": trace.longest}

    def _run_for(self, seconds: float) -> float:
        """Step for ``seconds``, and until a request of each model has ended; returns the elapsed seconds."""
        engine, started = self._engine, time.perf_counter()
        self.by_model = {model.name: Latencies() for model in self._load.models}
        while True:
            passed = time.perf_counter() - started
            if passed >= seconds and all(latencies.ttft_s for latencies in self.by_model.values()):
                return passed
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        """One step; submits the next request of each stream whose request ended."""
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"request {event.request_id} failed: {event.error}")
            model, times = self._running[event.request_id]
            times += [now] * len(event.tokens)
            latencies = self.by_model[model.name]
            latencies.tokens += len(event.tokens)
            if event.finish is not None:
                latencies.add(times)
                del self._running[event.request_id]
                self._submit_next(engine, model)

    def _submit_next(self, engine: Engine, model: Llama) -> None:
        draw = self._random
        prompt = draw.choices(range(100, VOCABULARY), k=draw.randint(*self._load.prompts))
        output = draw.randint(*self._load.outputs)
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        name = str(draw.getrandbits(64))
        self._running[name] = model, [time.perf_counter()]
        engine.submit(
            Request(
                id=name,
                service=model.name,
                prompt=prompt,
                sampling=sampling,
                arrival_ns=time.monotonic_ns(),
            )
        )
