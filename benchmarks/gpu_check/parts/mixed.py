"""The part `mixed` of `benchmarks/gpu_check`: three models in one engine, under load.

Each model has some streams, and a stream's next request comes when the one before it has ended: so there are
always decodes running while prompts come, and the load is as high as the device allows.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_check.cases import Cases, Figures, LeftOut, quantile
from benchmarks.gpu_check.models import engine_of, load, require_memory, service_of
from benchmarks.gpu_check.shapes import LLAMA_1B, LLAMA_3B, LLAMA_8B, TINY, VOCABULARY, Llama
from benchmarks.gpu_check.timing import traced
from shoal.core import Request, SamplingParams
from shoal.engine import Engine


@dataclass(frozen=True)
class Load:
    """How much is asked for. prompts, outputs: tokens, the fewest and the most."""

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
    wanted = TINY_LOAD if cases.tiny else USUAL
    with TemporaryDirectory() as folder:
        mixed = _Mixed(wanted, cases.device, Path(folder))
        seconds = 0.0 if cases.tiny else wanted.warm_up_s + wanted.measured_s + 5
        cases.run("all", mixed.measure, seconds=seconds, line=_LINE)
        for name, answered in mixed.by_model.items():
            cases.tell(name, "ok", answered.figures())
        cases.run(
            "steps under load, traced",
            mixed.trace,
            seconds=0.0 if cases.tiny else 5,
            line="idle {GPU idle:.0%}",
        )


@dataclass
class Answered:
    """Times of requests that have ended."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, times: Sequence[float]) -> None:
        """A request that ended: when it came, and when each of its tokens did."""
        came, first, *later = times
        self.ttft_s.append(first - came)
        if later:
            self.tpot_s.append((later[-1] - first) / len(later))

    def figures(self) -> Figures:
        """Of all of them."""
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
        self._asked: dict[str, tuple[Llama, list[float]]] = {}
        """Running requests: their models, and when they came and each of their tokens did."""
        self.by_model = {model.name: Answered() for model in load.models}
        """What was measured."""

    @cached_property
    def _engine(self) -> Engine:
        """It has a request for each stream from the beginning."""
        models, streams = self._load.models, self._load.streams
        longest = self._load.prompts[1] + self._load.outputs[1]
        kv_bytes = sum(model.kv_bytes(streams, longest) for model in models) * 3 // 2
        require_memory(self._device, models, kv_bytes)
        services = [service_of(model, self._folder) for model in models]
        engine = engine_of(load(self._device, services), services, kv_bytes)
        for model in models:
            for _ in range(streams):
                self._ask(engine, model)
        return engine

    def measure(self) -> Figures:
        """All streams for a while."""
        self._go_on(self._load.warm_up_s)
        measured_s = self._go_on(self._load.measured_s)
        every = Answered()
        for answered in self.by_model.values():
            every.ttft_s += answered.ttft_s
            every.tpot_s += answered.tpot_s
            every.tokens += answered.tokens
        return {**every.figures(), "tokens/s": every.tokens / measured_s}

    def trace(self) -> Figures:
        """What the GPU does in some steps; the tracing makes them slower."""
        steps = self._load.traced_steps
        engine = self._engine

        def make_steps() -> None:
            for _ in range(steps):
                self._step(engine)

        seen = traced(make_steps, self._device)
        if seen is None:
            raise LeftOut("this device tells nothing of kernels")
        return {"kernels a step": seen.kernels / steps, "GPU idle": seen.idle, "longest": seen.longest}

    def _go_on(self, seconds: float) -> float:
        """Steps for so long, and until a request of each model has ended; the seconds that they took."""
        engine, started = self._engine, time.perf_counter()
        self.by_model = {model.name: Answered() for model in self._load.models}
        while True:
            passed = time.perf_counter() - started
            if passed >= seconds and all(answered.ttft_s for answered in self.by_model.values()):
                return passed
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        """One step, and the next request of each stream whose last one ended."""
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"request {event.request_id} failed: {event.error}")
            model, times = self._asked[event.request_id]
            times += [now] * len(event.tokens)
            answered = self.by_model[model.name]
            answered.tokens += len(event.tokens)
            if event.finish is not None:
                answered.add(times)
                del self._asked[event.request_id]
                self._ask(engine, model)

    def _ask(self, engine: Engine, model: Llama) -> None:
        draw = self._random
        prompt = draw.choices(range(100, VOCABULARY), k=draw.randint(*self._load.prompts))
        output = draw.randint(*self._load.outputs)
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        name = str(draw.getrandbits(64))
        self._asked[name] = model, [time.perf_counter()]
        engine.submit(
            Request(
                id=name,
                service=model.name,
                prompt=prompt,
                sampling=sampling,
                arrival_ns=time.monotonic_ns(),
            )
        )
