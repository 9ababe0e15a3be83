"""Triton's kernels compile for GPUs that are not there: what a launch would compile, down to machine code."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from crossed import pairs
from shoal.execute.attention.kv_views import TORCH_DTYPES, LayerKV
from shoal.execute.linear.native_product import Activation

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs the package triton, which here compiles rather than interprets",
)

SHARED_BYTES = 64 << 10
"""Of shared memory, what small GPUs have."""
ARCHITECTURES = (80, 90)
"""An A100's and an H100's."""
LAYOUTS = ("merged", "split")
PROMPT_GPUS = {
    "an A100's": (80, 163 << 10),
    "an H100's": (90, 227 << 10),
    "with little shared memory": (80, SHARED_BYTES),
}
"""GPUs that prompts are compiled for: architecture, and bytes of shared memory of a thread block."""
SPILLED_BYTES = 64
"""Most bytes that a thread attending prompts keeps in memory on an H100; on an A100 it may be more."""


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
    compile_for: Callable[..., list[Any]], folder: Path, model: Model, layout: str, architecture: int
) -> None:
    """Compiles all kernels of decodes over a work list; they fit on a GPU and use its matrix units."""
    from shoal.execute.gpu.kernels.decode import attend_decodes, plan_work

    query, _, _, (kv, tables, lengths) = step_of(model, layout, rows=64)

    def step() -> None:
        work = plan_work(lengths, model.window, 66)
        attend_decodes(query, kv, tables, lengths, work, scaling=None, softcap=model.softcap)

    kernels = compile_for(architecture, step)
    _, attend, _ = kernels
    assert ("mma.sync" in attend.asm["ptx"]) == (model.dtype != "float32")
    assert "cp.async" in attend.asm["ptx"], "keys and values are not fetched while others are attended"
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES
        assert_in_registers(kernel, folder)


def compile_prompts(
    compile_for: Callable[..., list[Any]],
    folder: Path,
    patch: pytest.MonkeyPatch,
    model: Model,
    layout: str,
    gpu: tuple[int, int],
) -> None:
    """Compiles the kernel of prompts; it fits on the GPU and uses its matrix units."""
    from shoal.execute.gpu.kernels import prompts

    architecture, shared_bytes = gpu
    patch.setattr(prompts, "shared_bytes", lambda device: shared_bytes)
    query, _, _, (kv, tables, _) = step_of(model, layout, rows=64)
    rows = torch.empty((3, 4), dtype=torch.int32, device="meta")
    out = torch.empty((*query.shape[:2], model.value_dim), dtype=query.dtype, device="meta")

    def step() -> None:
        tiles = prompts.prompt_tiles(rows, 32, 7)
        prompts.attend_prompts(
            query, kv, tables, tiles, scaling=None, window=model.window, softcap=model.softcap, out=out
        )

    plan, kernel = compile_for(architecture, step)
    assert_in_registers(plan, folder)
    instruction = "wgmma.mma_async" if architecture == 90 else "mma.sync"
    assert (instruction in kernel.asm["ptx"]) == (model.dtype != "float32")
    assert "cp.async" in kernel.asm["ptx"], "keys and values are not fetched while others are attended"
    assert kernel.metadata.shared <= shared_bytes
    used = resources_of(kernel.asm["cubin"], folder)
    assert used["LOCAL"] == 0
    assert used["STACK"] <= SPILLED_BYTES or architecture == 80


def assert_in_registers(kernel: Any, folder: Path) -> None:
    used = resources_of(kernel.asm["cubin"], folder)
    assert used["STACK"] == used["LOCAL"] == 0, f"{kernel.metadata.name} keeps numbers in memory: {used}"


def compile_layer(
    compile_for: Callable[..., list[Any]], folder: Path, model: Model, layout: str, architecture: int
) -> None:
    """Compiles all kernels of a fused layer beside attention."""
    from shoal.execute.gpu.kernels.layer import TritonLayerKernels
    from shoal.execute.gpu.kernels.store import rotate_and_store, store

    kernels, tokens, heads = TritonLayerKernels(), 64, model.group * model.kv_heads
    query, key, value, (kv, tables, table_rows) = step_of(model, layout, tokens)
    positions = torch.empty(tokens, dtype=torch.int64, device="meta")
    x, wide = (query.new_empty((tokens, size)) for size in (heads * model.key_dim, 28672))
    hidden, of_head = (torch.empty(size, device="meta") for size in (x.shape[1], model.key_dim))
    norms = [
        *compile_for(architecture, kernels.norm, x, hidden, 1e-6),
        *compile_for(architecture, kernels.residual_norm, x, None, x, hidden, 1e-6),
        *compile_for(architecture, kernels.residual_norm, x, hidden, x, hidden, 1e-6),
    ]
    orders = {reduction for norm in norms for reduction in order_of_sums(norm.asm["ttgir"])}
    assert len(orders) == 1, "a row's norm has other bits if it is computed together with its sum"
    made = norms + compile_for(architecture, kernels.residual_norm, x, None, x, None, 1e-6)
    for activation in list(Activation)[1:]:
        made += compile_for(architecture, kernels.gated_activation, wide, activation)
    qkv = query.new_empty((tokens, (heads + model.kv_heads) * model.key_dim + value[0].numel()))
    angles = query.new_empty((tokens, model.key_dim))
    for scale, interleaved in ((None, False), (of_head, False), (None, True)):
        rotate = partial(
            rotate_and_store, heads=heads, cos=angles, sin=angles, rotary_interleaved=interleaved,
            q_scale=scale, k_scale=scale, norm_eps=1e-6,
        )  # fmt: skip
        made += compile_for(architecture, rotate, qkv, kv, tables, table_rows, positions)
    made += compile_for(architecture, store, key, value, kv, tables, table_rows, positions)
    assert len(made) == 4 + 3 + 3 + 1
    for kernel in made:
        assert kernel.metadata.shared <= SHARED_BYTES
        assert "fma.rn.f32" not in kernel.asm["ptx"] or "erf" in kernel.asm["ttir"]
        used = resources_of(kernel.asm["cubin"], folder)
        assert used["STACK"] == used["LOCAL"] == 0, f"{kernel.metadata.name} keeps numbers in memory: {used}"


def order_of_sums(ttgir: str) -> list[str]:
    """The layout of each tensor that is summed, which gives the order of sums."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    names = re.findall(r"\}\) : \(tensor<\S+?, (#\w+)>\) -> ", ttgir)
    return [layouts[name] for name in names]


def resources_of(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack, and shared and local memory of a kernel."""
    from triton import knobs

    (folder / "kernel.cubin").write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(count) for name, count in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", output)}


def test_decodes_compile(compile_for: Callable[..., list[Any]], tmp_path: Path) -> None:
    compile_decodes(compile_for, tmp_path, LLAMA, "merged", 90)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "architecture"), pairs(MODELS, LAYOUTS, ARCHITECTURES))
def test_decodes_of_any_model_compile(
    compile_for: Callable[..., list[Any]], tmp_path: Path, model: str, layout: str, architecture: int
) -> None:
    compile_decodes(compile_for, tmp_path, MODELS[model], layout, architecture)


def test_prompts_compile(
    compile_for: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_prompts(compile_for, tmp_path, monkeypatch, LLAMA, "merged", PROMPT_GPUS["an H100's"])


def test_steps_of_other_sizes_compile_nothing(compile_for: Callable[..., list[Any]]) -> None:
    """Kernels are the same for other numbers of rows, tiles and programs, and widths of tables."""
    from shoal.execute.gpu.kernels.decode import attend_decodes, plan_work
    from shoal.execute.gpu.kernels.prompts import attend_prompts, prompt_tiles

    def step(rows: int, width: int) -> None:
        query, _, _, (kv, tables, lengths) = step_of(LLAMA, "merged", rows)
        tables = torch.empty((3 * rows, width, 1), dtype=torch.int32, device="meta")
        work = plan_work(lengths, 16 + rows, 2 * rows)
        attend_decodes(query, kv, tables, lengths, work, scaling=None, softcap=None)
        tiles = prompt_tiles(torch.empty((rows, 4), dtype=torch.int32, device="meta"), rows, 3 * rows)
        attend_prompts(
            query,
            kv,
            tables,
            tiles,
            scaling=None,
            window=16 + rows,
            softcap=None,
            out=torch.empty_like(query),
        )

    first, *others = (compile_for(90, step, *sizes) for sizes in ((64, 32), (1, 1), (7, 33)))
    assert all(kernel is same for other in others for kernel, same in zip(other, first, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "gpu"), pairs(MODELS, LAYOUTS, PROMPT_GPUS))
def test_prompts_of_any_model_compile(
    compile_for: Callable[..., list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    layout: str,
    gpu: str,
) -> None:
    compile_prompts(compile_for, tmp_path, monkeypatch, MODELS[model], layout, PROMPT_GPUS[gpu])


def test_layers_compile(compile_for: Callable[..., list[Any]], tmp_path: Path) -> None:
    compile_layer(compile_for, tmp_path, LLAMA, "merged", 90)


def test_storing_compiles_once_for_any_numbers_of_tokens_and_blocks(
    compile_for: Callable[..., list[Any]],
) -> None:
    from shoal.execute.gpu.kernels.store import rotate_and_store, store

    made = []
    for tokens, blocks in ((1, 1), (7, 33), (64, 8192)):
        _, key, value, (kv, _, table_rows) = step_of(LLAMA, "merged", tokens)
        tables = torch.empty((256, blocks, 1), dtype=torch.int32, device="meta")
        where = (kv, tables, table_rows, torch.empty(tokens, dtype=torch.int64, device="meta"))
        qkv, angles = (key.new_empty((tokens, columns)) for columns in (48 * 128, 128))
        rotate = partial(
            rotate_and_store, heads=32, cos=angles, sin=angles, rotary_interleaved=False, q_scale=None,
            k_scale=None, norm_eps=1e-6,
        )  # fmt: skip
        made += compile_for(90, rotate, qkv, *where)
        for turn in (1, 0), (0, 1):
            turned = [x.permute(*turn, 2).contiguous().permute(*turn, 2) for x in (key, value)]
            made += compile_for(90, store, *turned, *where)
    assert len(made) == 9
    assert len({kernel.hash for kernel in made}) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "architecture"), pairs(MODELS, LAYOUTS, ARCHITECTURES))
def test_layers_of_any_model_compile(
    compile_for: Callable[..., list[Any]], tmp_path: Path, model: str, layout: str, architecture: int
) -> None:
    compile_layer(compile_for, tmp_path, MODELS[model], layout, architecture)
