"""Triton's kernels compile for GPUs that are not there: what a launch would compile, down to machine code."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.execute.attention.kv_views import TORCH_DTYPES, LayerKV

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs the package triton, which here compiles rather than interprets",
)

SHARED_BYTES = 64 << 10
"""Of shared memory, what small GPUs have."""
ARCHITECTURES = {80: "an A100's", 90: "an H100's"}


@dataclass(frozen=True)
class Model:
    """The attention of a model: what differs in kernels."""

    group: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None


LLAMA = Model(4, 8, 128, 128)
MODELS = {
    "llama 8B": LLAMA,
    "smollm2": Model(3, 3, 64, 64),
    "gemma 2 9B": Model(2, 8, 256, 256, window=4096, softcap=50.0),
    "phi 3 mini": Model(1, 32, 96, 96, dtype="float16", window=2047),
    "qwen 2.5 7B": Model(7, 4, 128, 128),
    "deepseek": Model(16, 1, 192, 128),
    "tests": Model(2, 2, 16, 24, dtype="float32"),
}


@pytest.fixture
def compile_for(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Calls a function and compiles the kernels that it starts, for an architecture; none of them runs.

    So what decides about machine code, such as strides that are multiples of 16, comes from the function.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    start, compiled = JITFunction.run, []

    def only_compile(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        del warmup
        compiled.append(start(self, *arguments, grid=grid, warmup=True, **keywords))

    def compile_for(architecture: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        monkeypatch.setattr(JITFunction, "run", only_compile)
        monkeypatch.setattr(driver, "_active", _AbsentGPU(GPUTarget("cuda", architecture, 32)))
        compiled.clear()
        function(*arguments)
        return list(compiled)

    return compile_for


class _AbsentGPU:
    """A Triton driver that is sufficient for compiling."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> Any:
        return self._target  # kernels are remembered by device

    def get_current_stream(self, device: Any) -> int:
        return 0


def step_of(
    model: Model, layout: str, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Query, key and value of decodes; and where they lie, in a pool of 16 GiB. None of it takes memory."""
    dtype, block = TORCH_DTYPES[model.dtype], 16
    split = layout == "split"
    heads = () if split else (model.kv_heads,)
    in_entry = block * (model.key_dim + model.value_dim) * (1 if split else 32 * model.kv_heads)
    entries = (16 << 30) // (in_entry * dtype.itemsize)

    def stored(dim: int) -> torch.Tensor:
        inner = (dim, 1) if split else (model.kv_heads * dim, dim, 1)
        pool = torch.empty(entries * in_entry, dtype=dtype, device="meta")
        return pool.as_strided((entries, block, *heads, dim), (in_entry, *inner))

    kv = LayerKV(
        stored(model.key_dim),
        stored(model.value_dim),
        model.kv_heads,
        key_head=0 if split else model.key_dim,
        value_head=0 if split else model.value_dim,
        first_entry=0,
        head_entry=1 if split else 0,
    )
    query, key, value = (
        torch.empty((rows, count, dim), dtype=dtype, device="meta")
        for count, dim in (
            (model.group * model.kv_heads, model.key_dim),
            (model.kv_heads, model.key_dim),
            (model.kv_heads, model.value_dim),
        )
    )
    tables = torch.empty((256, 8192, 32 * model.kv_heads if split else 1), dtype=torch.int32, device="meta")
    return query, key, value, (kv, tables[:rows], torch.empty(rows, dtype=torch.int32, device="meta"))


def compile_decodes(
    compile_for: Callable[..., list[Any]],
    folder: Path,
    model: Model,
    layout: str,
    architecture: int,
    rows: int,
) -> None:
    """Compiles all kernels of decodes; they fit on a GPU and use its matrix units."""
    from shoal.execute.attention.triton_kernels import attend_decodes, store_decodes

    query, key, value, where = step_of(model, layout, rows)
    attend, together = compile_for(
        architecture, attend_decodes, query, *where, None, model.window, model.softcap
    )
    ptx = attend.asm["ptx"]
    assert ("mma.sync" in ptx) == (model.dtype != "float32")
    assert "cp.async" in ptx, "keys and values are not fetched while others are attended"
    for kernel in (attend, together, *compile_for(architecture, store_decodes, key, value, *where)):
        assert kernel.metadata.shared <= SHARED_BYTES
        used = resources_of(kernel.asm["cubin"], folder)
        assert used["STACK"] == used["LOCAL"] == 0, f"{kernel.metadata.name} keeps numbers in memory: {used}"


def resources_of(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack, and shared and local memory of a kernel."""
    from triton import knobs

    (folder / "kernel.cubin").write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(count) for name, count in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", output)}


def test_decodes_compile(compile_for: Callable[..., list[Any]], tmp_path: Path) -> None:
    compile_decodes(compile_for, tmp_path, LLAMA, "merged", 90, rows=64)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=ARCHITECTURES.get)
@pytest.mark.parametrize("layout", ["merged", "split"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_decodes_of_any_model_compile(
    compile_for: Callable[..., list[Any]], tmp_path: Path, model: Model, layout: str, architecture: int
) -> None:
    for rows in (1, 64):
        compile_decodes(compile_for, tmp_path, model, layout, architecture, rows)
