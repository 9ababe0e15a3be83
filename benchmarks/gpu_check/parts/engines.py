"""GPU check, part `engines`: decode steps of whole engines, with one and two steps in flight.

Requests are those of `benchmarks/iterations.py`: 32 prompt and 65 output tokens each, all at once. A step
reads all weights except the embeddings, so it takes at least their bytes by the copy bandwidth of the device;
*of floor* is the step time relative to that.
"""

import gc
import time
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_check.cases import Cases, Figures, SkipCase
from benchmarks.gpu_check.models import engine_of, load, require_memory, service_of
from benchmarks.gpu_check.shapes import LLAMA_1B, LLAMA_8B, TINY, Llama
from benchmarks.gpu_check.timing import copy_gb_per_s, traced
from benchmarks.iterations import SERVICE, make_requests, measure
from shoal.core import Request, Service
from shoal.engine import Engine
from shoal.execute.model.model_set import ModelSet

PROMPT, OUTPUT = 32, 65
ROWS = (1, 16, 64, 256)
DEPTHS = (1, 2)
_WARM_UP = 4
_TRACED_STEPS = 20
_SECONDS = 4.0


def run(cases: Cases) -> None:
    models = TINY[:1] if cases.tiny else (LLAMA_1B, LLAMA_8B)
    rows = ROWS[:2] if cases.tiny else ROWS
    seconds = 0.0 if cases.tiny else _SECONDS
    with TemporaryDirectory() as folder:
        for model in models:
            bench = _Bench(model, cases, Path(folder), rows[-1])
            cases.run(f"{model.name}, weights", bench.load, seconds=seconds)
            for count in rows:
                for depth in DEPTHS:
                    line = f"{model.name} x {count} {{ms a step:.2f}} ms" if depth == 1 else None
                    name = f"{model.name}, {count} rows, depth {depth}"
                    cases.run(name, partial(bench.decode, count, depth), seconds=seconds, line=line)
            for count in sorted({rows[0], rows[-2]}):
                name = f"{model.name}, {count} rows, depth {DEPTHS[-1]}, traced"
                cases.run(name, partial(bench.trace, count), seconds=seconds, line="idle {GPU idle:.0%}")
            bench.close()


class _Bench:
    """One model with an engine for each depth."""

    def __init__(self, model: Llama, cases: Cases, folder: Path, max_rows: int) -> None:
        self._model = model
        self._device, self._tiny = cases.device, cases.tiny
        self._output = 2 * _WARM_UP if cases.tiny else OUTPUT
        self._folder = folder
        self._kv_bytes = model.kv_bytes(max_rows, PROMPT + self._output)
        self._engines: dict[int, Engine] = {}
        self._number = 0

    @cached_property
    def _service(self) -> Service:
        return service_of(self._model, self._folder, SERVICE)

    @cached_property
    def _models(self) -> ModelSet:
        require_memory(self._device, [self._model], len(DEPTHS) * self._kv_bytes)
        return load(self._device, [self._service])

    @cached_property
    def _copy_gb_per_s(self) -> float:
        return copy_gb_per_s(self._device, tiny=self._tiny)

    def load(self) -> Figures:
        started = time.perf_counter()
        size = self._models.weight_bytes
        forward = type(self._models.services[SERVICE].model.forward).__name__
        return {"GiB": size / 2**30, "seconds to load": time.perf_counter() - started, "forward": forward}

    def decode(self, rows: int, depth: int) -> Figures:
        engine = self._engine(depth)
        measure(engine, 1, self._requests(rows, _WARM_UP))  # records, and compiles
        done = measure(engine, 1, self._requests(rows, self._output))
        floor_ms = self._model.read_bytes / self._copy_gb_per_s / 1e6
        return {
            "ms a step": done.tpot_ms,
            "tokens/s": done.tokens_per_s,
            "of floor": done.tpot_ms / floor_ms,
            "scheduling, us": done.scheduling_us,
        }

    def trace(self, rows: int) -> Figures:
        """Kernels of some steps, which tracing slows down."""
        engine = self._engine(DEPTHS[-1])
        requests = self._requests(rows, self._output)
        engine.submit(*requests)
        decoding: set[str] = set()
        while len(decoding) < rows:
            decoding.update(event.request_id for event in engine.step())
        steps = _WARM_UP if self._tiny else _TRACED_STEPS
        trace = traced(lambda: [engine.step() for _ in range(steps)], self._device)
        engine.cancel_all()
        while engine.busy:
            engine.step()
        if trace is None:
            raise SkipCase("this device reports no kernels")
        return {"kernels a step": trace.kernels / steps, "GPU idle": trace.idle, "longest": trace.longest}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        self.__dict__.pop("_models", None)
        gc.collect()
        if self._device != "cpu":
            import torch

            torch.cuda.empty_cache()

    def _engine(self, depth: int) -> Engine:
        if depth not in self._engines:
            self._engines[depth] = engine_of(self._models, [self._service], self._kv_bytes, depth)
        return self._engines[depth]

    def _requests(self, rows: int, output: int) -> list[Request]:
        self._number += 1
        return make_requests(rows, PROMPT, output, self._number)
