"""GPU check, part `prompts`: prefill steps of the executor, without an engine.

Steps that are short enough to be recorded are also measured without that: launched kernel by kernel.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.gpu_check.cases import Cases, Figures
from benchmarks.gpu_check.models import load, require_memory, service_of, steps_of_prompts
from benchmarks.gpu_check.shapes import LLAMA_1B, LLAMA_8B, TINY, Llama
from benchmarks.step_profile import SERVICE, Bench

_ROUNDS = 5
_SECONDS = 3.0


@dataclass(frozen=True)
class Chunk:
    """A step of ``rows`` prompts that compute ``tokens`` tokens each, after ``computed`` tokens."""

    rows: int
    tokens: int
    computed: int = 0

    def __str__(self) -> str:
        behind = f" behind {self.computed:,}" if self.computed else ""
        return f"{self.rows} x {self.tokens:,} tokens{behind}"


CHUNKS = (
    *(Chunk(1, 2048), Chunk(16, 128), Chunk(1, 2048, 32_768)),
    *(Chunk(1, tokens) for tokens in (32, 100, 260, 500, 1000)),
    Chunk(8, 32),
)
TINY_CHUNKS = (Chunk(1, 32), Chunk(4, 8), Chunk(1, 16, 64))
_RECORDED_TOKENS = 512
"""Most tokens of steps that are measured in both ways."""


def run(cases: Cases) -> None:
    models = TINY[:1] if cases.tiny else (LLAMA_1B, LLAMA_8B)
    chunks = TINY_CHUNKS if cases.tiny else CHUNKS
    seconds = 0.0 if cases.tiny else _SECONDS
    with TemporaryDirectory() as folder:
        for model in reversed(models):
            steps = _Steps(model, cases, Path(folder), chunks)
            for chunk in chunks:
                line = f"{model.name} {chunk} {{ms:.1f}} ms"
                cases.run(f"{model.name}, {chunk}", partial(steps.measure, chunk), seconds=seconds, line=line)
            del steps


class _Steps:
    def __init__(self, model: Llama, cases: Cases, folder: Path, chunks: Sequence[Chunk]) -> None:
        self._model = model
        self._device = cases.device
        self._folder = folder
        self._kv_bytes = max(model.kv_bytes(each.rows, each.computed + each.tokens) for each in chunks)

    @cached_property
    def _bench(self) -> Bench:
        require_memory(self._device, [self._model], self._kv_bytes)
        bench = Bench(load(self._device, [service_of(self._model, self._folder, SERVICE)]), self._kv_bytes)
        bench.executor.store.buffer.zero_()
        return bench

    def measure(self, chunk: Chunk) -> Figures:
        tokens = chunk.rows * chunk.tokens
        seconds = self._seconds(chunk)
        figures: dict[str, float | str] = {"ms": 1e3 * seconds, "tokens/s": tokens / seconds}
        if tokens <= _RECORDED_TOKENS:
            with steps_of_prompts(recorded=False):
                figures["ms, launched one by one"] = 1e3 * self._seconds(chunk)
        return figures

    def _seconds(self, chunk: Chunk) -> float:
        """Median time of a step."""
        known, times = chunk.computed + chunk.tokens, []
        with self._bench.sequences(chunk.rows, known, chunk.computed) as joined:
            for _ in range(1 + _ROUNDS):  # the first one compiles, records and allocates
                started = time.perf_counter()
                self._bench.step(joined, chunk.tokens)
                times.append(time.perf_counter() - started)
        return median(times[1:])
