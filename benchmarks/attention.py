"""Speed and memory of attention over a paged KV pool on a CPU: native kernels, torch operations, int8 KV.

    python -m benchmarks.attention                       # bfloat16, all cores
    python -m benchmarks.attention --threads 1 --cpu-time --cases "decode 64 x 192" --dtype float32

Every case is a step over random keys and values in scattered blocks of 16 tokens: the preparation of the
step, and the attention of all layers (of the first few in long steps; their time is scaled). Backends take
turns within each round, so that a slow machine affects all. Prints least and median milliseconds, medians
relative to the native kernels, and the growth of the process at its peak (Linux).
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.table import Table

from benchmarks.interrupts import print_at_end
from shoal.engine.build import default_threads
from shoal.execute.attention.kv_buffers import KVStore
from shoal.execute.attention.kv_views import TORCH_DTYPES, ServiceCache
from shoal.execute.attention.selector import choose_backend
from shoal.execute.attention.spec import AttentionSpec
from shoal.execute.attention.torch_backends import PagedAttention
from shoal.execute.batch import StepBatch
from shoal.execute.malloc import keep_freed_memory
from shoal.kvcache import KVShape, LayerShape, plan_layout

BLOCK = 16
CPU = torch.device("cpu")
COMPARED = {"batched": ("batched", False), "native": ("native", False), "int8 KV": ("native", True)}
"""Backend, and whether KV is int8."""
LONG_LAYERS = 3
"""Layers computed in a long step."""


@dataclass(frozen=True)
class Model:
    """Attention shapes of a model."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    dim: int
    window: int | None


@dataclass(frozen=True)
class Case:
    """A step whose rows all start at position ``first`` and compute ``tokens`` tokens."""

    name: str
    rows: int
    first: int
    tokens: int

    @property
    def is_long(self) -> bool:
        """Whether it is a prefill."""
        return self.tokens > 1


SMOLLM2 = Model("SmolLM2-135M", layers=30, heads=9, kv_heads=3, dim=64, window=None)
GEMMA3 = Model("Gemma 3 270M", layers=18, heads=4, kv_heads=1, dim=256, window=512)
CASES = (
    Case("decode 1 x 192", 1, 191, 1),
    Case("decode 16 x 192", 16, 191, 1),
    Case("decode 64 x 192", 64, 191, 1),
    Case("decode 64 x 1000", 64, 999, 1),
    Case("decode 1 x 8000", 1, 7_999, 1),
    Case("decode 1 x 30000", 1, 29_999, 1),
    Case("prefill 16 x 128", 16, 0, 128),
    Case("prefill 2048", 1, 0, 2048),
    Case("prefill 2048 after 8000", 1, 8000, 2048),
)


class Workload:
    """A case's pool, step and tensors."""

    def __init__(self, model: Model, case: Case, dtype: str) -> None:
        self.model, self.case = model, case
        self.layers = min(model.layers, LONG_LAYERS) if case.is_long else model.layers
        self.shapes = {int8: kv_shape(model, dtype, self.layers, int8) for int8 in (False, True)}
        self.caches = {int8: make_cache(case, shape) for int8, shape in self.shapes.items()}
        self.batch = make_batch(case)
        shape = (case.rows * case.tokens, model.heads + 2 * model.kv_heads, model.dim)
        self.packed = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(TORCH_DTYPES[dtype])

    def run(self, backend: type[PagedAttention], int8: bool) -> None:
        step = backend(self.batch, self.caches[int8])
        model, spec = self.model, AttentionSpec(window=self.model.window)
        query, rest = self.packed[:, : model.heads], self.packed[:, model.heads :]
        key, value = rest[:, : model.kv_heads], rest[:, model.kv_heads :]
        for layer in range(self.layers):
            step.attend(layer, query, key, value, spec)


def kv_shape(model: Model, dtype: str, layers: int, int8: bool) -> KVShape:
    return KVShape(dtype, (LayerShape(model.kv_heads, model.dim, model.dim),) * layers, int8)


def make_cache(case: Case, shape: KVShape) -> ServiceCache:
    blocks = case.rows * blocks_of(case)
    memory_bytes = blocks * (shape.block_bytes(BLOCK) + 1024)  # blocks are padded
    layout = plan_layout({"a": shape}, memory_bytes=memory_bytes, block_size=BLOCK)
    assert layout.merged_blocks >= blocks
    store = KVStore(layout, CPU)
    random = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(TORCH_DTYPES[shape.dtype])
    if shape.int8:  # any number, and a scale of about 1
        random = torch.full((1 << 15,), 0x3F7F, dtype=torch.int16).view(torch.bfloat16)
    content = store.buffer.view(random.dtype)
    for start in range(0, len(content), len(random)):
        part = content[start : start + len(random)]
        part.copy_(random[: len(part)])
    return store.services["a"]


def blocks_of(case: Case) -> int:
    return -(-(case.first + case.tokens) // BLOCK)


def make_batch(case: Case) -> StepBatch:
    starts = np.arange(case.rows + 1) * case.tokens
    positions = torch.arange(case.first, case.first + case.tokens).repeat(case.rows)
    tables = np.random.default_rng(0).permutation(case.rows * blocks_of(case))
    return StepBatch(
        input_ids=torch.zeros_like(positions)[None],
        positions=positions[None],
        starts=starts,
        firsts=np.full(case.rows, case.first),
        tables=tables.reshape(case.rows, -1),
        last=starts[1:] - 1,
    )


def status_mib(field: str) -> float:
    """A field of Linux's /proc/self/status that is in kB; NaN elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def peak_mib(work: Callable[[], None]) -> float:
    """Growth of the process at the peak of ``work``, in MiB."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # do not reuse freed memory
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    except (AttributeError, OSError):
        return float("nan")
    before = status_mib("VmRSS")
    work()
    return status_mib("VmHWM") - before


def measure(
    workload: Workload, rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of each round, and MiB at the peak, by backend."""
    compared = {
        name: (choose_backend(backend, CPU, workload.shapes[int8]), int8)
        for name, (backend, int8) in COMPARED.items()
    }
    peaks = {name: peak_mib(partial(workload.run, *chosen)) for name, chosen in compared.items()}
    times: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, chosen in compared.items():
            before = clock()
            workload.run(*chosen)
            passed = (clock() - before) * 1e3
            times[name].append(passed * workload.model.layers / workload.layers)
    return times, peaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9, help="of decodes; of prefills a third as many")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, waiting ones included")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    clock = time.process_time if options.cpu_time else time.perf_counter
    table = Table(title=f"Attention of a step, {options.dtype}, {options.threads} threads")
    for column in ("model", "case", *COMPARED, "ratios", "peak MiB"):
        table.add_column(column, justify="left" if column in ("model", "case") else "right")
    with print_at_end(table, 120):
        for model in (SMOLLM2, GEMMA3):
            for case in (case for case in CASES if case.name in options.cases):
                rounds = max(3, options.rounds // 3) if case.is_long else options.rounds
                with torch.inference_mode():
                    times, peaks = measure(Workload(model, case, options.dtype), rounds, clock)
                batched, native, int8 = (median(times[name]) for name in COMPARED)
                shown = [f"{min(times[name]):.1f} / {median(times[name]):.1f}" for name in COMPARED]
                sizes = " / ".join(f"{peaks[name]:.0f}" for name in COMPARED)
                ratios = f"{batched / native:.2f} / {int8 / native:.2f}"
                table.add_row(model.name, case.name, *shown, ratios, sizes)


if __name__ == "__main__":
    main()
